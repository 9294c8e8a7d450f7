"""Stands in for `vllm serve` and for the router: a tiny HTTP server.

``python fake_child.py serve|router ... --port P``. What it does besides comes
from the folder in ``FAKE_DIR``: each start adds a line to ``NAME.starts``; with a
file ``NAME.dies`` it ends with the status in there before it answers; with
``NAME.stubborn`` it ignores SIGTERM and SIGINT; with ``NAME.busy`` SIGTERM makes a file
``NAME.told``, and it ends when the first file is gone. SIGUSR1 ends it with status 0; the
router says of those with a file ``NAME.departed`` that they left in good order, asks for what a
file ``change`` says, and drains what it is told to. An instance has a child process of its own.
With keys in the environment it asks for the first of them, and with ``--ssl-certfile`` it speaks
https, as both do.
"""

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEYS = ("VLLM_API_KEY", "TETRI_INSTANCE_API_KEY")


def option(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def main() -> None:
    folder = Path(os.environ["FAKE_DIR"])
    name = option("--tetri-instance", "router")
    with (folder / f"{name}.starts").open("a") as starts:
        start = {"pid": os.getpid(), "argv": sys.argv[1:]}
        start["secret_file"] = os.environ.get("TETRI_SECRET_FILE")
        start["safe_path"] = sys.flags.safe_path
        start["keys"] = {name: os.environ.get(name, "") for name in KEYS}
        starts.write(json.dumps(start) + "\n")
    print(
        f"(APIServer pid=1) INFO 01-01 00:00:00 [x.py:1] Starting to load model {name}", flush=True
    )
    dies = folder / f"{name}.dies"
    if dies.exists():
        print("(EngineCore pid=2) ERROR 01-01 00:00:00 [x.py:2] no such model", flush=True)
        sys.exit(int(dies.read_text()))
    if (folder / f"{name}.stubborn").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    busy = folder / f"{name}.busy"
    if busy.exists():

        def finish(*_: object) -> None:
            (folder / f"{name}.told").touch()
            while busy.exists():
                time.sleep(0.01)
            sys.exit(0)

        signal.signal(signal.SIGTERM, finish)
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    if name != "router":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        whole = folder / f"{name}.below.part"
        whole.write_text(str(child.pid))
        whole.rename(folder / f"{name}.below")  # never seen half written

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ids = [path.stem for path in folder.glob("*.starts") if path.stem != "router"]
            departed = {path.stem: "" for path in folder.glob("*.departed")}
            gone = {*departed, *(path.stem for path in folder.glob("*.forgotten"))}
            models = {i: "another" if i == "by-hand" else "fake-model" for i in ids}
            listed = [{"id": i, "state": "ready", "model": models[i]} for i in ids if i not in gone]
            asked = folder / "change"
            changes = json.loads(asked.read_text()) if asked.exists() else []
            bodies = {
                "/health": {},
                "/tetri/v1/instances": {
                    "instances": listed,
                    "departed": departed,
                    "changes": changes,
                },
                "/v1/models": {"data": [{"id": "fake-model"}]},
            }
            body = json.dumps(bodies.get(self.path, {})).encode()
            key = os.environ.get(KEYS[0], "").partition("\n")[0]
            is_open = not key or self.path == "/health"
            if is_open or self.headers["Authorization"] == f"Bearer {key}":
                self.send_response(200 if self.path in bodies else 404)
            else:
                self.send_response(401)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            name = self.path.split("/")[-2]
            (folder / f"{name}.departed").touch()
            (folder / "change").unlink()
            last = (folder / f"{name}.starts").read_text().splitlines()[-1]
            os.kill(json.loads(last)["pid"], signal.SIGUSR1)
            self.send_response(202)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler)
    if option("--ssl-certfile"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(option("--ssl-certfile"), option("--ssl-keyfile") or None)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
