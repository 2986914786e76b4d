"""A real single-node Kubernetes for the demo and the tests.

`python tests/cluster/cluster.py up|down|status|kubeconfig`
"""

from __future__ import annotations

import argparse
import sys
import time

from localcluster import lifecycle
from localcluster.record import Record
from localcluster.settings import ClusterError, state_folder


def _progress(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)


def _status() -> int:
    record = Record.load(state_folder())
    if record is None:
        print("no local cluster is running")
        return 1
    for name, process in record.processes.items():
        print(f"{name:24} {'running' if process.alive else 'ENDED':8} pid {process.pid}")
    print(f"kubeconfig {record.state.admin_kubeconfig}\nlogs       {record.state.logs}")
    return 0 if record.healthy else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster.py", description=__doc__)
    parser.add_argument("command", choices=["up", "down", "status", "kubeconfig"])
    command = parser.parse_args().command
    try:
        if command == "status":
            return _status()
        if command == "kubeconfig":
            print(state_folder().admin_kubeconfig)
        elif command == "up":
            started = time.monotonic()
            state = lifecycle.up(_progress)
            _progress(f"the node is Ready after {time.monotonic() - started:.1f} s")
            print(f"export KUBECONFIG={state.admin_kubeconfig}")
        else:
            _progress("cluster removed" if lifecycle.down() else "there is no local cluster")
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
