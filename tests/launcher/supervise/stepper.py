"""A worker without a model: it makes steps, and obeys as a trainer does.

`stepper.py NUM_STEPS [FAULT@STEP]`. A fault waits until the file `go` is there; then the step goes
on (`late`), is the last of this process (`kill`), never ends (`hang`), or differs (`differ`).
"""

import os
import signal
import sys
import time
from pathlib import Path

from model_check.engine.stop import StopSignal, Terminated
from model_check.events import Done, EventSink, Phase, Step, Vectors
from model_check.hooks.lockstep import SupervisorClient

LAB = Path(os.environ["LAB"])
SAME, OTHER = (1.0).hex(), (2.0).hex()


def main() -> int:
    sink, stop = EventSink(int(os.environ["MODEL_CHECK_EVENTS_FD"]), is_held=True), StopSignal()
    client = SupervisorClient(
        sink,
        stop,
        on_notice=False,
        answer=lambda step: Vectors(step=step, fp={"weights": {"w": "1"}}),
    )
    exit_code = 0
    with stop.installed(), stop.heeded(), stop.deferred():
        try:
            train(client, sink, stop)
        except Terminated as terminated:
            exit_code = 128 + terminated.signum
    sink.emit(Done(exit_code=exit_code))
    return exit_code


def train(client: SupervisorClient, sink: EventSink, stop: StopSignal) -> None:
    fault, _, at = sys.argv[2].partition("@") if len(sys.argv) > 2 else ("", "", "-1")
    sink.emit(Phase(name="train"))
    for step in range(int(sys.argv[1])):
        client.wait_for_permit(step)
        stop.check()
        loss = SAME
        if step == int(at):
            wait_for_go()
            loss = act(fault)
        sink.emit(Step(step=step, loss=loss, grad_norm=SAME, lr=0.1, ms=1.0, tokens=1))
    client.tell_finished()
    client.wait_for_release()


def wait_for_go() -> None:
    while not (LAB / "go").exists():
        time.sleep(0.01)


def act(fault: str) -> str:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while fault == "hang":
        time.sleep(1.0)
    return OTHER if fault == "differ" else SAME


if __name__ == "__main__":
    sys.exit(main())
