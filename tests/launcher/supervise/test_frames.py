"""Where a process is, from the texts of faulthandler and py-spy."""

from launcher.supervise.frames import innermost

FAULTHANDLER = """\
Thread 0x00007f3a56e1d6c0 (most recent call first):
  File "/lib/python3.11/threading.py", line 982 in run
  File "/lib/python3.11/threading.py", line 1045 in _bootstrap_inner

Current thread 0x00007f3a578a4b80 (most recent call first):
  File "/app/model_check/engine/step.py", line 41 in accumulate
  File "/app/model_check/engine/step.py", line 20 in train_step
  File "/app/model_check/engine/trainer.py", line ??? in _loop
  File "/app/pretrain_main.py", line 9 in <module>
"""
PY_SPY = """\
Process 4711: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4711 (active+gil): "MainThread"
    step (train.py:3)
    <module> (train.py:9)
Thread 4712 (idle): "pump"
    wait (threading.py:324)
"""


def test_the_main_thread_is_the_last_one_of_faulthandler() -> None:
    told = "accumulate (step.py:41) < train_step (step.py:20) < _loop (trainer.py:???)"
    assert innermost(FAULTHANDLER) == told


def test_the_main_thread_is_named_by_py_spy() -> None:
    assert innermost(PY_SPY) == "step (train.py:3) < <module> (train.py:9)"


def test_a_text_without_stacks_has_none() -> None:
    assert innermost("") is None
    assert innermost("Error: Permission denied (os error 1)\n") is None
    assert innermost("Thread 0x1 (most recent call first):\n") is None
