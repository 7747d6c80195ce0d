"""A process that sends back every byte to one client after the other: as few round trips can take here."""

from __future__ import annotations

import json
import socket
import sys


def main() -> None:
    """Listens at the path of its options, until it is killed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(json.loads(sys.argv[1])["path"])
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client:
                while received := client.recv(4096):
                    client.sendall(received)


if __name__ == "__main__":
    main()
