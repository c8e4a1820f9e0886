"""The scripted trainer as a rank of a job: ranks meet once a step, over real sockets, at the port
that the launcher has taken for them. Rank 0 is the hub. A rank that loses another one, or waits too
long for it, says so as a real one does."""

import os
import select
import socket
import time
from pathlib import Path

from tests.scripted import pretrain_main
from tests.scripted.pretrain_main import BEAT_S, FLOWS, WORKER, Ended, Worker

NOT_FINITE = ("nan", "inf", "loss_nan")
FIRST_WAIT_S, WAIT_S = 600.0, 60.0


class Rank(Worker):
    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.peers: list[socket.socket] = []
        """Rank 0 has all others, each of them has rank 0."""
        self.waited_s = 0.0
        self.has_lost_one = self.keeps_evidence = False

    # -- what is its own in what it tells

    def say(self, text: str) -> None:
        if self.rank == 0 or self.settings["logging"]["all_ranks"]:
            super().say(text)

    def emit(self, **event: object) -> None:
        if event["kind"] in ("step", "vectors"):
            event["fp"] = {q: found for q, found in event["fp"].items() if q not in FLOWS}
        if event["kind"] == "step":
            own_loss = float.fromhex(event["loss"]) / self.size + 2**-20 * self.rank
            event |= {"own_loss": own_loss.hex(), "wait_ms": round(self.waited_s * 1000, 3)}
            event["tokens"] *= self.size
            if self.shard:
                event["taken"] = f"shard {self.shard}: {event['taken']}"
        if event.get("name") == "build" and self.shard:
            event["detail"]["shard"] = self.shard
        if event["kind"] == "done" and self.has_lost_one:
            event["peer_lost"] = True
        super().emit(**event)

    @property
    def shard(self) -> str:
        """`1 of 2`; empty: it holds the model whole."""
        launch = self.settings["launch"]
        if launch["mode"] != "fsdp" or self.size == 1:
            return ""
        num_shards = launch["fsdp"]["shard_size"] or self.size
        return f"{self.rank % num_shards} of {num_shards}"

    # -- what it leaves: the first rank saves for all

    def save(self, name: str) -> None:
        if self.rank == 0:
            super().save(name)
        else:
            self.emit(kind="phase", name="save")
            self.emit(kind="phase", name="train")

    def evidence(self, name: str) -> None:
        if self.rank == 0 or name != "error.pt":
            self.keeps_evidence = True
            super().evidence(name)

    def _place(self) -> Path:
        directory = Path(self.settings["system"]["checkpoint_dir"])
        is_own = self.keeps_evidence and self.rank > 0
        return directory / WORKER.lower() if is_own else directory

    # -- the others

    def _begin(self) -> None:
        self._join()
        super()._begin()

    def _join(self) -> None:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if self.rank == 0 and self.size > 1:
            listener = socket.socket(fileno=int(os.environ["MODEL_CHECK_STORE_FD"]))
            listener.listen()
            while len(self.peers) < self.size - 1:
                self._wait_for(listener, FIRST_WAIT_S)
                self.peers.append(listener.accept()[0])
        while self.rank > 0 and not self.peers:
            try:
                self.peers = [socket.create_connection(address, timeout=BEAT_S)]
            except OSError:  # rank 0 does not listen yet
                self.check()
                self.requests.wait(0.01)

    def meet(self) -> None:
        """Each rank gives what it has of this step; one with a NaN takes part no more."""
        if self.drill.kind in NOT_FINITE and self.drill.step == self.num_done:
            self.part()
            return
        began = time.monotonic()
        wait_s = float(self.settings["launch"]["rank_timeout_s"] or WAIT_S)
        if self.rank > 0:
            self._send()
        for peer in self.peers:
            self._wait_for(peer, wait_s)
            self._receive(peer)
        if self.rank == 0:
            self._send()
        self.waited_s = time.monotonic() - began

    def part(self) -> None:
        for peer in self.peers:
            peer.close()
        self.peers = []

    def _send(self) -> None:
        for peer in self.peers:
            try:
                peer.sendall(b".")
            except OSError:
                self._lose("another rank is gone (Connection reset by peer)")

    def _receive(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(1)
        except OSError:
            data = b""
        if not data:
            self._lose("another rank is gone (Connection closed by peer)")

    def _wait_for(self, peer: socket.socket, wait_s: float) -> None:
        """Until it has something to read. Beats, and hears signals."""
        until = time.monotonic() + wait_s
        beat_at = time.monotonic() + BEAT_S
        while not select.select([peer], [], [], 0)[0]:
            self.check()
            now = time.monotonic()
            if now >= until:
                self._lose(f"another rank did not come in {wait_s:g} s")
            if now >= beat_at:
                self.emit(kind="beat")
                beat_at = now + BEAT_S
            self.requests.wait(min(beat_at, until) - now, peer)

    def _lose(self, text: str) -> None:
        print(f"error: {text}", flush=True)
        self.has_lost_one = True
        raise Ended(1, text)


def main() -> None:
    pretrain_main.main(Rank)
