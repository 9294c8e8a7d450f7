"""What the Helm chart renders: valid manifests that fit together, or a clear refusal."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import subprocess
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.chart import (
    CHART,
    NAME,
    NAMESPACE,
    ROLES,
    Manifest,
    container_of,
    helmed,
    manifests_of,
    one,
    pod_of,
    rendered,
)
from tests.needed import needed, require_command
from vllm_tetri import cli
from vllm_tetri.config import options

kubernetes_validate = needed("kubernetes_validate")
keda = needed("cloudcoil.models.keda.v1alpha1")
prometheus_operator = needed("cloudcoil.models.prometheus_operator.v1")
kmock = needed("kmock")

ROOT = CHART.parents[2]
GPU = {"nvidia.com/gpu": "present"}
FULL: dict[str, Any] = {
    "image": {"repository": "registry/tetri", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "mode": "adaptive",
    "revision": "7",
    "router": {
        "replicas": 3, "args": ["--ttft-slo", "2"], "flip": "off", "nodeSelector": {"a": "b"},
        "podAnnotations": {"a": "b"}, "tolerations": [{"operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    },
    "instances": {
        "args": ["--max-model-len", "8192"], "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "resources": {"requests": {"cpu": "4", "memory": "32Gi"}}, "nodeSelector": GPU,
        "tolerations": [{"key": "gpu", "operator": "Exists"}], "runtimeClassName": "nvidia",
        "affinity": {"nodeAffinity": {}}, "podAnnotations": {"a": "b"},
        "volumes": [{"name": "m", "persistentVolumeClaim": {"claimName": "models"}}],
        "volumeMounts": [{"name": "m", "mountPath": "/models", "readOnly": True}],
    },
    "prefill": {"replicas": 2, "gpus": 2, "args": ["--tensor-parallel-size", "2"]},
    "decode": {"replicas": 3, "shmSize": "16Gi", "drainSeconds": 60},
    "both": {"replicas": 1, "gpus": 0, "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "50%"}},
    "apiKeys": {"existing": "keys"},
    "networkPolicy": {
        "enabled": True, "clients": [{"podSelector": {}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}],
    },
    "podMonitor": {"enabled": True, "interval": "5s", "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True, "prometheusAddress": "http://prometheus:9090"},
}  # fmt: skip
BARE: dict[str, Any] = {
    "prefill": {"replicas": 0},
    "decode": {"replicas": 0},
    "both": {"replicas": 1},
    "router": {"replicas": 1},
    "secret": {"existing": "mine"},
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "podSecurityContext": None,
    "securityContext": None,
}
SETS: dict[str, dict[str, Any]] = {"default": {}, "full": FULL, "bare": BARE}
CUSTOM = {"keda.sh/v1alpha1": keda, "monitoring.coreos.com/v1": prometheus_operator}


@cache
def manifests(name: str) -> list[Manifest]:
    return rendered(**SETS[name])


@pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])
@pytest.mark.parametrize("name", SETS)
def test_every_manifest_is_valid_without_unknown_fields(name: str, version: str) -> None:
    kinds = set()
    for each in manifests(name):
        kinds.add(each["kind"])
        if each["apiVersion"] in CUSTOM:
            model = getattr(CUSTOM[each["apiVersion"]], each["kind"]).model_validate(each)
            assert model.model_dump(mode="json", by_alias=True, exclude_unset=True) == each
        else:
            kubernetes_validate.validate(each, version, strict=True)
    assert ("ScaledObject" in kinds) == ("PodMonitor" in kinds) == (name == "full")


def test_the_validators_refuse_what_is_unknown_or_of_another_type() -> None:
    router = one(manifests("default"), "Deployment", "router")
    for change in ({"replicas": "2"}, {"replica": 2}):
        wrong = deepcopy(router)
        wrong["spec"] |= change
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, "1.37", strict=True)
    wrong = deepcopy(one(manifests("full"), "ScaledObject", "decode"))
    wrong["spec"]["pollInterval"] = 1
    model = keda.ScaledObject.model_validate(wrong)
    assert model.model_dump(mode="json", by_alias=True, exclude_unset=True) != wrong


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": ""}, "/model"),
    "no image": ({"image": {"repository": ""}}, "/image/repository"),
    "unknown": ({"decode": {"replicas": 1, "replica": 2}}, "'replica' not allowed"),
    "mode": ({"mode": "splitt"}, "'split', 'adaptive', 'whole'"),
    "number as word": ({"instances": {"args": ["--x", 1]}}, "got number, want string"),
    "no prefill": ({"prefill": {"replicas": 0}}, "mode split needs a prefill instance"),
    "no decode": ({"decode": {"replicas": 0}}, "mode split needs a decode instance"),
    "nothing": (
        {"mode": "whole", "prefill": {"replicas": 0}, "decode": {"replicas": 0}}, "no instance"),
    "grace period": (
        {"decode": {"replicas": 1, "terminationGracePeriodSeconds": 329}},
        "decode: terminationGracePeriodSeconds 329 is too short"),
    "grace period of all": (
        {"instances": {"terminationGracePeriodSeconds": 20}}, "shutdownTimeout + 5 = 330"),
    "no room": (
        {"instances": {"rollingUpdate": {"maxSurge": 0}}}, "no pod could ever be replaced"),
    "role": ({"prefill": {"replicas": 1, "args": ["--role=both"]}}, "the chart sets --role itself"),
    "underscore": ({"instances": {"args": ["--tetri_control", "x"]}}, "sets --tetri-control"),
    "ranks": ({"instances": {"args": ["-dp", "2"]}}, "give replicas instead"),
    "lease": ({"router": {"args": ["--flip-lease", "f"]}}, "router.args: the chart sets"),
    "TLS": ({"router": {"args": ["--ssl-certfile", "f"]}}, "end TLS in front of the routers"),
    "no metrics": ({"autoscaling": {"enabled": True}}, "needs autoscaling.prometheusAddress"),
    "bounds": (
        {"autoscaling": {"enabled": True, "prometheusAddress": "x", "decode": {"min": 5}}},
        "autoscaling.decode: min 5 is above max 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused(name: str) -> None:
    values, words = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        rendered(**values)


def test_what_is_right_at_its_bound_is_accepted() -> None:
    least = {"drainSeconds": 10, "shutdownTimeout": 5, "terminationGracePeriodSeconds": 20}
    assert pod_of(rendered(instances=least), "decode")["terminationGracePeriodSeconds"] == 20
    rendered(prefill={"replicas": 0}, both={"replicas": 1})


def labels_of(each: Manifest) -> dict[str, str]:
    found: dict[str, str] = each["spec"]["template"]["metadata"]["labels"]
    return found


def selected(found: list[Manifest], labels: dict[str, str]) -> set[str]:
    pods = (each for each in found if each["kind"] == "Deployment")
    return {
        each["metadata"]["name"].removeprefix(f"{NAME}-")
        for each in pods
        if labels.items() <= labels_of(each).items()
    }


def test_selectors_select_what_they_are_for() -> None:
    found = manifests("full")
    instances = set(ROLES)
    for each in found:
        kind, name, spec = each["kind"], each["metadata"]["name"], each.get("spec", {})
        component = name.removeprefix(f"{NAME}-")
        if kind in ("Deployment", "PodDisruptionBudget"):
            assert selected(found, spec["selector"]["matchLabels"]) == {component}
        elif kind == "Service":
            assert selected(found, spec["selector"]) == {"router"}
        elif kind == "PodMonitor":
            assert selected(found, spec["selector"]["matchLabels"]) == {"router"}
        elif kind == "NetworkPolicy":
            chosen = selected(found, spec["podSelector"]["matchLabels"])
            assert chosen == ({"router"} if component == "router" else instances)
    assert one(found, "ScaledObject", "decode")["spec"]["scaleTargetRef"]["name"] == "llm-decode"
    assert "replicas" not in one(found, "Deployment", "decode")["spec"]


@pytest.mark.parametrize(
    ("policy", "port", "peers"),
    [
        ("router", 18555, set(ROLES)),
        ("instances", 18600, set(ROLES)),
        ("instances", 8000, {"router"}),
        ("router", 8000, {"router", *ROLES}),
    ],
)
def test_ports_inside_the_cluster_are_open_to_its_pods_only(
    policy: str, port: int, peers: set[str]
) -> None:
    found = manifests("full")
    rules = one(found, "NetworkPolicy", policy)["spec"]["ingress"]
    (rule,) = (each for each in rules if [one["port"] for one in each["ports"]] == [port])
    labels = [
        each["podSelector"].get("matchLabels") for each in rule["from"] if "podSelector" in each
    ]
    assert set().union(*(selected(found, each) for each in labels if each)) == peers
    others = [each for each in rule["from"] if not each.get("podSelector", {}).get("matchLabels")]
    given = FULL["networkPolicy"]
    assert others == {
        ("router", 8000): given["clients"], ("instances", 8000): given["monitoring"],
    }.get((policy, port), [])  # fmt: skip
    ports = {each["containerPort"] for c in ("router", "decode") for each in
             container_of(found, c)["ports"]}  # fmt: skip
    assert port in ports


def test_clients_are_admitted_from_anywhere_unless_told() -> None:
    rules = one(manifests("default"), "NetworkPolicy", "router")["spec"]["ingress"]
    assert {"ports": [{"protocol": "TCP", "port": 8000}]} in rules


def test_instances_find_every_router_also_before_it_is_ready() -> None:
    found = manifests("default")
    service = one(found, "Service", "control")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert (
        f"--tetri-control=tcp://llm-control.{NAMESPACE}.svc:18555"
        in (container_of(found, "prefill")["args"])
    )


@pytest.mark.parametrize("name", SETS)
def test_the_options_of_containers_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = {each.flag for each in options().values()}
    found = manifests(name)
    for component in {"router", *ROLES} & {
        each["metadata"]["name"].removeprefix(f"{NAME}-")
        for each in found
        if each["kind"] == "Deployment"
    }:
        container = container_of(found, component)
        if component == "router":
            words = [each.replace("$(POD_IP)", "127.0.0.1") for each in container["args"]]
            with pytest.raises(SystemExit):  # it parses them before it sees the last one
                cli.main(["router", *words, "--no-such-option"])
            said = capsys.readouterr().err
            assert "unrecognized arguments: --no-such-option; see" in said
        else:
            flags = {each.partition("=")[0] for each in container["args"]}
            assert {each for each in flags if each.startswith("--tetri")} <= known
            assert f"--role={component}" in container["args"]


def test_probes_and_drains_are_those_that_the_docs_promise() -> None:
    found = manifests("full")
    router, decode = container_of(found, "router"), container_of(found, "decode")
    assert router["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert router["readinessProbe"]["httpGet"]["path"] == "/readyz"
    start = decode["startupProbe"]
    assert start["failureThreshold"] * start["periodSeconds"] == 1800
    assert pod_of(found, "decode")["terminationGracePeriodSeconds"] == 60 + 25 + 5
    assert pod_of(found, "router")["terminationGracePeriodSeconds"] == 5 + 25 + 5
    words = decode["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert words == (
        'VLLM_API_KEY="$ROUTER_API_KEYS" exec vllm-tetri drain "$POD_NAME" --force --deadline 60 '
        f"--url http://llm-control.{NAMESPACE}.svc:8000"  # also while no router is ready
    )


def test_pods_have_devices_shared_memory_and_no_more_than_they_need() -> None:
    found = manifests("full")
    gpus = {role: container_of(found, role)["resources"].get("limits") for role in ROLES}
    assert gpus == {"prefill": {"nvidia.com/gpu": 2}, "decode": {"nvidia.com/gpu": 1}, "both": None}
    pod = pod_of(found, "decode")
    memory = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert memory in pod["volumes"]
    assert (pod["enableServiceLinks"], pod["automountServiceAccountToken"]) == (False, False)
    given = container_of(found, "prefill")["args"]
    assert given[-4:] == ["--max-model-len", "8192", "--tensor-parallel-size", "2"]


def test_routers_may_use_their_lease_and_nothing_else() -> None:
    found = manifests("default")
    (word,) = (each for each in container_of(found, "router")["args"] if "lease" in each)
    lease = word.removeprefix("--flip-lease=kubernetes:")
    rules = one(found, "Role", "flips")["rules"]
    verbs = {verb: each.get("resourceNames") for each in rules for verb in each["verbs"]}
    assert verbs == {"create": None, "get": [lease], "update": [lease]}
    assert {each["apiGroups"][0] for each in rules} == {"coordination.k8s.io"}
    (subject,) = one(found, "RoleBinding", "flips")["subjects"]
    assert subject["name"] == pod_of(found, "router")["serviceAccountName"]
    assert not any(each["kind"] == "Role" for each in manifests("full"))  # its flips are off


def test_keys_of_clients_stay_with_routers_and_drains() -> None:
    def keys(name: str, component: str) -> dict[str, str]:
        env = container_of(manifests(name), component)["env"]
        refs = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef") for each in env}
        return {key: f"{ref['name']}/{ref['key']}" for key, ref in refs.items() if ref}

    assert keys("full", "router") == {
        "TETRI_SECRET": "llm/secret",
        "VLLM_API_KEY": "keys/api-keys",
        "TETRI_INSTANCE_API_KEY": "llm/instance-api-key",
    }
    assert keys("full", "decode") == {
        "TETRI_SECRET": "llm/secret",
        "VLLM_API_KEY": "llm/instance-api-key",
        "ROUTER_API_KEYS": "keys/api-keys",
    }
    assert keys("bare", "both") == {"TETRI_SECRET": "mine/secret"}
    assert not any(each["kind"] == "Secret" for each in manifests("bare"))


async def test_a_secret_is_made_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By helm, which asks a stand-in of the API for it and keeps the release in a file."""
    api = kmock.KubernetesEmulator()
    api.resources["v1/secrets"] = {
        "kind": "Secret",
        "singular": "secret",
        "namespaced": True,
        "verbs": {"get", "list"},
    }
    api["/version"] << {"major": "1", "minor": "35", "gitVersion": "v1.35.0"}
    releases, config = tmp_path / "releases", tmp_path / "config"
    releases.touch()
    monkeypatch.setenv("HELM_DRIVER", "memory")
    monkeypatch.setenv("HELM_MEMORY_DRIVER_DATA", str(releases))
    monkeypatch.setenv("KUBECONFIG", str(config))
    async with api, kmock.Server(api, host="127.0.0.1", port=0):
        config.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": str(api.url).rstrip("/")}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        }))  # fmt: skip
        first, other = [await asyncio.to_thread(installed_secret) for _ in range(2)]
        api.objects["v1/secrets", NAMESPACE, NAME] = first
        again = await asyncio.to_thread(installed_secret)
    assert first["data"]["secret"] != other["data"]["secret"]
    assert first["data"]["instance-api-key"] != other["data"]["instance-api-key"]
    assert again == first
    assert first["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert len(base64.b64decode(base64.b64decode(first["data"]["secret"]))) == 32


def installed_secret() -> Manifest:
    return one(manifests_of(json.loads(helmed("install", "-o", "json"))["manifest"]), "Secret", "")


def triggers(component: str) -> dict[str, tuple[str, float]]:
    spec = one(manifests("full"), "ScaledObject", component)["spec"]
    found = [each["metadata"] for each in spec["triggers"]]
    named = re.compile(r"tetri_instance_\w+")
    return {named.findall(m["query"])[0]: (m["query"], float(m["threshold"])) for m in found}


def test_rules_find_the_labels_that_the_monitor_sets() -> None:
    (endpoint,) = one(manifests("full"), "PodMonitor", "")["spec"]["podMetricsEndpoints"]
    changes = {each["targetLabel"]: each for each in endpoint["relabelings"]}
    rules = (ROOT / "examples/operate/rules.yml").read_text()
    assert f'job="{changes["job"]["replacement"]}"' in rules
    assert "by (router)" in rules
    assert changes["router"]["sourceLabels"] == ["__meta_kubernetes_pod_name"]


def test_pods_are_not_drained_before_the_load_was_less_for_so_long() -> None:
    scaled = one(manifests("full"), "ScaledObject", "decode")["spec"]["advanced"]
    down = scaled["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down == {"stabilizationWindowSeconds": 300}


def test_autoscaling_counts_every_instance_once(tmp_path: Path) -> None:
    """By Prometheus itself: two routers show the same instances, two of which count."""
    require_command("promtool", "prometheus")
    known = set(re.findall(r"`(tetri_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    decode, both = triggers("decode"), triggers("both")
    assert [*both] == ["tetri_instance_queued_prefill_tokens", "tetri_instance_blocks_used"]
    for query, _ in both.values():
        assert set(re.findall(r"tetri_\w+", query)) <= known
    query, threshold = decode["tetri_instance_blocks_used"]
    assert threshold == 0.7
    series = [
        {"series": f'tetri_instance_{what}'
                   f'{{instance="{who}-5d4f-aaaa{used % 10}",namespace="{where}",pod="{router}"}}',
         "values": str(value)}
        for router in (0, 1)
        for who, where, used in (
            ("llm-decode", NAMESPACE, 25), ("llm-decode", NAMESPACE, 50),
            ("llm-prefill", NAMESPACE, 70), ("llm-decode", "other", 80),
            ("llm-decode-2-decode", NAMESPACE, 90),
        )
        for what, value in (("blocks_used", used), ("blocks_total", 100))
    ]  # fmt: skip
    test = {
        "tests": [{
            "interval": "15s", "input_series": series,
            "promql_expr_test": [{
                "expr": query, "eval_time": "0s", "exp_samples": [{"labels": "{}", "value": 0.75}],
            }],
        }],
    }  # fmt: skip
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
