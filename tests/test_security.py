"""The cluster's secret: files that are taken and refused, and what follows from it."""

from __future__ import annotations

import base64
import os
import pickle
from pathlib import Path

import pytest

from vllm_tetri import cli
from vllm_tetri.config import is_here, require_guarded
from vllm_tetri.errors import ConfigError
from vllm_tetri.security import (
    VALUE_VARIABLE,
    VARIABLE,
    Secret,
    kv_key_of,
    read_secret,
    secret_file_of,
    share_secret,
)

RAW = bytes(range(40))


def file_with(folder: Path, text: str | bytes, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        RAW.hex(),
        RAW.hex().upper() + "\n",
        base64.b64encode(RAW).decode(),
        base64.urlsafe_b64encode(RAW).decode().rstrip("="),
        base64.encodebytes(RAW * 2).decode(),  # in lines, as `openssl rand -base64` has them
    ],
)
def test_hexadecimal_and_base64_are_read(tmp_path: Path, text: str) -> None:
    secret = read_secret(file_with(tmp_path, text))
    assert secret is not None
    raw = RAW * 2 if "\n" in text.strip() else RAW
    assert secret.key("x") == Secret(raw).key("x")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "0 bytes"),
        (RAW[:31].hex(), "31 bytes"),
        ("00" * 32, "nearly all the same"),
        ("not a secret!", "neither hexadecimal nor base64"),
        (b"\xff" * 64, "not text"),
        ("ab" * 5000, "more than 4096"),
    ],
)
def test_what_is_no_secret_is_refused_without_being_shown(
    tmp_path: Path, text: str | bytes, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        read_secret(file_with(tmp_path, text))
    assert "vllm-tetri secret" in str(caught.value)
    assert len(text) < 8 or str(text)[:8] not in str(caught.value)


@pytest.mark.parametrize("mode", [0o604, 0o660, 0o666, 0o610])
def test_a_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(file_with(tmp_path, RAW.hex(), mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = file_with(tmp_path, RAW.hex())
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"user 12345.*chown"):
        read_secret(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_root_may_be_read_by_the_own_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts a Secret: two links, and the group of `fsGroup`."""
    (tmp_path / "..2026").mkdir()
    file_with(tmp_path / "..2026", RAW.hex())
    (tmp_path / "..data").symlink_to("..2026")
    path = tmp_path / "secret"
    path.symlink_to("..data/secret")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "getgroups", lambda: [2000])

    def give(user: int, group: int, mode: int) -> str:
        os.chown(path, user, group)
        path.chmod(mode)
        return str(path)

    assert read_secret(give(0, 2000, 0o440)) is not None
    assert read_secret(give(0, 2000, 0o640)) is not None
    for user, group, mode in (
        (0, 3000, 0o440),  # another group
        (777, 2000, 0o440),  # another user, who may change it
        (0, 2000, 0o460),
        (0, 2000, 0o444),
    ):
        with pytest.raises(ConfigError, match=f"secret file .*user {user}"):
            read_secret(give(user, group, mode))
    with pytest.raises(ConfigError, match="chmod 600"):
        read_secret(give(12345, 2000, 0o440))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (str(pipe), str(tmp_path)):
        with pytest.raises(ConfigError, match="no file"):
            read_secret(path)
    with pytest.raises(ConfigError, match="vllm-tetri secret"):
        read_secret(str(tmp_path / "absent"))


def test_a_stricter_mode_and_a_link_are_fine(tmp_path: Path) -> None:
    """Orchestrators mount secrets read-only, behind links."""
    file_with(tmp_path, RAW.hex(), 0o400)
    (tmp_path / "link").symlink_to("secret")
    assert read_secret(str(tmp_path / "link")) is not None
    assert read_secret("") is None
    assert kv_key_of("") == b""


def test_keys_are_of_their_purpose_and_the_secret_shows_nowhere(tmp_path: Path) -> None:
    secret = Secret(RAW)
    assert len(secret.key("one")) == 32
    assert secret.key("one") == Secret(RAW).key("one")
    assert len({secret.key("one"), secret.key("other"), Secret(RAW + b"x").key("one")}) == 3
    assert kv_key_of(file_with(tmp_path, RAW.hex())) == secret.key("kv")
    assert repr(secret) == str(secret) == "Secret(...)"
    with pytest.raises(TypeError):
        pickle.dumps(secret)


def test_the_command_makes_a_private_file_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new"
    assert cli.main(["secret", str(path)]) == 0
    text = path.read_text().strip()
    said = capsys.readouterr().out
    assert f"--tetri-secret-file {path}" in said
    assert text not in said
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(str(path)) is not None
    assert cli.main(["secret", str(path)]) == 2
    assert "there already" in capsys.readouterr().err
    assert path.read_text().strip() == text
    assert cli.main(["secret", str(tmp_path / "no" / "folder")]) == 2


def test_an_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert secret_file_of(None) == ""
    monkeypatch.setenv(VARIABLE, "/of/environment")
    assert secret_file_of(None) == "/of/environment"
    assert secret_file_of("/given") == "/given"


def test_the_environment_may_hold_the_secret_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/of/environment")
    monkeypatch.setenv(VALUE_VARIABLE, RAW.hex())
    with pytest.raises(ConfigError, match="both set"):
        secret_file_of(None)
    assert secret_file_of("/given") == "/given"
    monkeypatch.delenv(VARIABLE)
    path = secret_file_of(None)
    assert VALUE_VARIABLE not in os.environ
    assert secret_file_of(None) == os.environ[VARIABLE] == path  # children find it
    assert kv_key_of(path) == Secret(RAW).key("kv")
    monkeypatch.setenv(VALUE_VARIABLE, "short")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match="vllm-tetri secret") as caught:
        read_secret(secret_file_of(None))
    assert "short" not in str(caught.value)


def test_up_shares_a_secret_that_no_file_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    path = share_secret(None)
    assert os.environ[VARIABLE] == path
    assert Path(path).stat().st_mode & 0o777 == 0o600
    first = read_secret(path)
    assert first is not None
    assert first.key("x") == read_secret(path).key("x")  # type: ignore[union-attr]
    assert share_secret(None) == path
    os.close(int(path.rpartition("/")[2]))
    with pytest.raises(ConfigError):
        read_secret(path)


def test_up_takes_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/of/environment")
    monkeypatch.setenv(VALUE_VARIABLE, "not for children")
    path = file_with(tmp_path, RAW.hex())
    assert share_secret(path) == os.environ[VARIABLE] == path
    assert VALUE_VARIABLE not in os.environ
    Path(path).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        share_secret(path)


def test_addresses_of_this_machine_are_known() -> None:
    for address in ("127.0.0.1", "127.3.2.1", "::ffff:127.0.0.1"):
        assert is_here(address)
    for address in ("192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1", "None"):
        assert not is_here(address)


def test_other_addresses_than_loopback_need_a_secret() -> None:
    for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost"):
        require_guarded("--control", host, has_secret=False)
    for host in ("0.0.0.0", "10.0.0.1", "::", "router.example", "*"):
        require_guarded("--control", host, has_secret=True)
        with pytest.raises(ConfigError, match=r"--control .*vllm-tetri secret FILE"):
            require_guarded("--control", host, has_secret=False)
