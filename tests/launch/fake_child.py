"""Stands in for `vllm serve` and for the router: a tiny HTTP server.

``python fake_child.py serve|router ... --port P``. What it does besides comes
from the folder in ``FAKE_DIR``: each start adds a line to ``NAME.starts``; with a
file ``NAME.dies`` it ends with the status in there before it answers; with
``NAME.stubborn`` it ignores SIGTERM. SIGUSR1 ends it with status 0; the router says
of those with a file ``NAME.departed`` that they left in good order. An instance has a
child process of its own.
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def option(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def main() -> None:
    folder = Path(os.environ["FAKE_DIR"])
    name = option("--tetri-instance", "router")
    with (folder / f"{name}.starts").open("a") as starts:
        starts.write(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:]}) + "\n")
    print(
        f"(APIServer pid=1) INFO 01-01 00:00:00 [x.py:1] Starting to load model {name}", flush=True
    )
    dies = folder / f"{name}.dies"
    if dies.exists():
        print("(EngineCore pid=2) ERROR 01-01 00:00:00 [x.py:2] no such model", flush=True)
        sys.exit(int(dies.read_text()))
    if (folder / f"{name}.stubborn").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    if name != "router":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / f"{name}.below").write_text(str(child.pid))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ids = [path.stem for path in folder.glob("*.starts") if path.stem != "router"]
            departed = {path.stem: "" for path in folder.glob("*.departed")}
            listed = [{"id": i, "state": "ready"} for i in ids]
            bodies = {
                "/health": {},
                "/tetri/v1/instances": {"instances": listed, "departed": departed},
                "/v1/models": {"data": [{"id": "fake-model"}]},
            }
            body = json.dumps(bodies.get(self.path, {})).encode()
            self.send_response(200 if self.path in bodies else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            return

    ThreadingHTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
