"""report.html: what it shows of a result and its story, and never as markup."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from launcher.report.page.document import page
from launcher.report.page.gpu_curves import GpuCurves
from launcher.report.page.story import Story
from launcher.telemetry.health import Record
from launcher.verdict.curves import Curves
from launcher.verdict.disagreement import Disagreement, Replay
from launcher.verdict.facts import WorkerFacts
from launcher.verdict.results import RunResult, SplitResult, Verdict
from launcher.verdict.severity import CauseClass, Repeat, Severity
from model_check.errors import EXIT_HANG, EXIT_UNNAMED
from model_check.events import NonFinite, Origin, Telemetry
from tests.launcher.report.page.stories import record, result, story, worker

_VOID = {"br", "link", "meta", "wbr"}
_SCRIPT = "<script>alert(1)</script>"
ISOLATE = {
    "cause_class": CauseClass.HARDWARE,
    "severity": Severity.ISOLATE,
    "repeat": Repeat.PERSISTENT,
}
MONITOR = {"cause_class": CauseClass.HARDWARE, "severity": Severity.MONITOR}
GPU = {
    "name": "NVIDIA H100",
    "uuid": "GPU-1234abcd",
    "pci_bus_id": "00000000:3B:00.0",
    "serial": "1650000000003",
}


class Tags(HTMLParser):
    """Whether every tag that was opened was closed, in order; its names and its text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(document)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def shown(of: RunResult, how: Story | None = None) -> Tags:
    names = [worker.name for worker in of.workers]
    return Tags(page(of, how or story(*names)))


def failed(*last_lines: str, **more: Any) -> RunResult:
    told = worker(
        "GPU0",
        Verdict.FAIL,
        cause="exit code 1: <b>bold</b>",
        loss_last="nan",
        notes=['a "note"'],
        evidence=["/run/dossier/gpu0/nan.pt", "/elsewhere/nan.pt"],
        last_lines=list(last_lines),
        **more,
    )
    summary = "GPU0 failed & that is all"
    return result(told, verdict=Verdict.FAIL, exit_code=1, summary=summary, culprits=["GPU0"])


def test_the_page_is_whole_and_tells_everything() -> None:
    text = shown(failed("first", "last")).text
    for told in ("GPU0 failed & that is all", 'a "note"', "nan.pt", "first\nlast", "exit code"):
        assert told in text


def test_what_a_worker_printed_is_text_and_no_markup() -> None:
    drilled = story("GPU0", drill=_SCRIPT, stacks={"GPU0": f"</pre>{_SCRIPT}"})
    tags = shown(failed(_SCRIPT, "</pre><img src=x>", detail={_SCRIPT: _SCRIPT}), drilled)
    assert {"script", "img"}.isdisjoint(tags.names)
    assert tags.text.count(_SCRIPT) == 5


def test_a_name_of_evidence_opens_no_attribute() -> None:
    hostile = '/run/dossier/"onmouseover="alert(1)/x.pt'
    tags = shown(result(worker("GPU0", Verdict.FAIL, evidence=[hostile])))
    assert "dossier/%22onmouseover%3D%22alert%281%29/x.pt" in tags.links


def test_a_name_of_evidence_is_no_script() -> None:
    tags = shown(result(worker("GPU0", Verdict.FAIL, evidence=["/run/javascript:alert(1)"])))
    assert "javascript%3Aalert%281%29" in tags.links


def test_links_hold_where_the_directory_is_moved_to() -> None:
    tags = shown(failed())
    assert "dossier/gpu0/nan.pt" in tags.links
    assert all("elsewhere" not in link for link in tags.links)
    assert "/elsewhere/nan.pt" in tags.text


def test_nothing_is_fetched_and_no_script_is_needed() -> None:
    tags = shown(failed())
    assert "script" not in tags.names
    assert not [link for link in tags.links if link.startswith(("http", "//"))]


def test_every_split_has_its_row_and_without_any_there_is_no_table() -> None:
    held_out = SplitResult(
        split="held <i>out", step=30, loss=2.5, perplexity=12.1825, tokens_per_s=1234.5
    )
    broken = SplitResult(split="code", step=30, loss="nan", perplexity=None, tokens_per_s=None)
    text = shown(failed(validation=[held_out, broken])).text.replace("\n", "")
    assert "GPU0held <i>out302.500012.181,234" in text
    assert "GPU0code30nann/an/a" in text
    assert "Validation" not in shown(failed()).text


def test_a_verdict_has_a_sign_beside_its_colour() -> None:
    assert '<b class="FAIL">✕ FAIL</b>' in page(failed(), story("GPU0"))


def test_the_first_screen_says_which_since_when_and_what_to_do() -> None:
    odd = worker("GPU3", Verdict.FAIL, gpu=GPU, cause="differs", evidence=["/run/x"], **ISOLATE)
    stopped = [worker(f"GPU{at}", Verdict.STOPPED, cause="stopped by us") for at in range(3)]
    bits = {"GPU0": "ab12", "GPU1": "ab12", "GPU2": "ab12", "GPU3": "ab32"}
    told = result(
        *stopped,
        odd,
        verdict=Verdict.FAIL,
        exit_code=21,
        culprits=["GPU3"],
        disagreement=Disagreement(57, "loss", bits),
        do_now="Take GPU3 out of service.",
    )
    text = shown(told).text.replace("\n", "")
    assert "✕ FAIL: GPU3 on node17" in text
    assert "GPU3 (NVIDIA H100, GPU-1234abcd, bus 00000000:3B:00.0, serial 1650000000003)" in text
    assert "sincestep 57" in text
    assert "do nowTake GPU3 out of service." in text
    assert "GPU0, GPU1 and GPU2 were stopped: nothing is known against them." in text
    assert text.index("do now") < text.index("Workers") < text.index("What happened")


def test_the_sentence_of_the_fault_stands_once() -> None:
    cause = "non-finite gradient at step 2"
    bad = worker("GPU3", Verdict.FAIL, cause=cause, last_lines=["x"], **ISOLATE)
    summary = f"GPU3 failed first: {cause}"
    told = result(bad, worker("GPU1"), verdict=Verdict.FAIL, culprits=["GPU3"], summary=summary)
    assert shown(told).text.count(cause) == 1


def test_bits_stand_side_by_side_and_digits_that_differ_are_marked() -> None:
    bits = {"CPU0": "0x1.8p+1", "CPU1": "0x1.9p+1", "CPU2": "0x1.8p+1"}
    told = result(worker("CPU1", Verdict.SUSPECT), disagreement=Disagreement(4, "loss", bits))
    document = page(told, story("CPU0", "CPU1", "CPU2"))
    assert "<code>0x1.<mark>9</mark>p+1</code>" in document
    same = '<th scope="row">CPU0 and CPU2</th><td class="word"><code>0x1.8p+1</code></td><td>3</td>'
    assert same in document


def test_a_drill_stands_in_the_headline() -> None:
    document = page(failed(), story("GPU0", drill="nan@7:GPU0"))
    header = document[document.index("<header") : document.index("</header>")]
    assert "DRILL: nan@7:GPU0 was injected; this fault is not real" in header


def test_where_a_nan_was_born_is_told_with_its_counts() -> None:
    origin = Origin(
        direction="forward",
        module="layers.3.attention.wq",
        tensor="output",
        shape=[2, 32, 64],
        num_nan=1,
        num_inf=0,
        first=[0, 3, 5],
    )
    event = NonFinite(
        t=4_000_000_000, step=7, where="loss", loss="nan", grad_norm="nan", origin=origin
    )
    facts = WorkerFacts(nonfinite=event, first_nonfinite=event)
    text = shown(failed(), story("GPU0", all_facts={"GPU0": facts})).text.replace("\n", "")
    assert "step 7, 4.0 s after the start (2026-11-23 05:00:04)" in text
    assert "7forwardlayers.3.attention.wqoutput2 x 32 x 64" in text
    assert "1 NaN of 4,096 values, first at [0, 3, 5]" in text


def test_values_that_differ_are_shown_with_both_bits_and_their_mask() -> None:
    value = {"index": [1, 2], "odd": "3f80", "peer": "3f84", "xor": "0004", "bits": "bit 2"}
    difference = {"odd": "CPU1", "peer": "CPU0", "tensors": {"weights/wq": {"first": [value] * 40}}}
    told = result(worker("CPU1", Verdict.FAIL))
    text = shown(told, story("CPU1", differences={"CPU1": difference})).text.replace("\n", "")
    assert "CPU1 beside CPU0, value by value" in text
    assert text.count("weights/wq[1, 2]3f803f840004bit 2") == 8


def test_a_silent_worker_shows_where_it_stood() -> None:
    hung = worker("CPU1", Verdict.FAIL, cause="silent for 4 s")
    told = result(hung, verdict=Verdict.FAIL, exit_code=EXIT_HANG, culprits=["CPU1"])
    curve, facts = (
        Curves(last_ns=17_000_000_000, before_end_ns=12_000_000_000),
        WorkerFacts(last_step=8),
    )
    how = story(
        "CPU1", stacks={"CPU1": "File x.py"}, curves={"CPU1": curve}, all_facts={"CPU1": facts}
    )
    text = shown(told, how).text.replace("\n", "")
    assert "after step 8, 12.0 s after the start" in text
    assert "Where it stoodFile x.py" in text


UNKNOWN = {"cause_class": CauseClass.UNKNOWN, "severity": Severity.MONITOR}


def test_of_two_that_differ_none_is_called_the_culprit() -> None:
    bits = {"CPU0": "ab12", "CPU1": "ab32"}
    rows = [worker(name, Verdict.INCONCLUSIVE, **UNKNOWN) for name in bits]
    told = result(
        *rows,
        verdict=Verdict.INCONCLUSIVE,
        exit_code=EXIT_UNNAMED,
        disagreement=Disagreement(4, "loss", bits),
        replays=[Replay(to_step=4, said="replayed once: CPU1 gave other bits")],
    )
    text = shown(told).text
    assert "INCONCLUSIVE: one of CPU0 and CPU1" in text
    assert "replayed once: CPU1 gave other bits" in text


def test_what_was_asked_for_is_open_and_the_rest_is_folded(tmp_path: Path) -> None:
    how = story("GPU0")
    document = page(failed(), how)
    assert "preset</dt><dd>cpu" in document[: document.index("<details")]


def test_the_command_is_whole_and_can_be_pasted() -> None:
    asked = record("GPU0", command=["train", "my texts/", "--max-steps", "3"])
    how = Story(directory=Path("/run"), record=asked)
    assert "bash run.sh train 'my texts/' --max-steps 3" in shown(failed(), how).text


def test_what_is_to_be_done_is_said_first_and_not_again_as_what_happened() -> None:
    symptom = "Xid 79: power-cycle"
    bad = worker("GPU3", Verdict.FAIL, cause=symptom, symptoms=[symptom], **ISOLATE)
    said = f"GPU3: {symptom}"
    summary = f"{said}; 2 warnings about GPU5"
    told = result(bad, verdict=Verdict.FAIL, culprits=["GPU3"], summary=summary, do_now=said)
    text = shown(told).text.replace("\n", "")
    assert f"do now{said}what2 warnings about GPU5" in text
    assert text.count(symptom) == 1


def test_the_bits_of_each_worker_have_a_table_and_no_place_in_the_sentence() -> None:
    bits = {"GPU0": "ab12", "GPU1": "ab12", "GPU3": "ab32"}
    found = Disagreement(57, "gradients", bits)
    told = result(worker("GPU3", Verdict.FAIL), disagreement=found, summary=f"{found}; replayed")
    text = shown(told).text
    assert "GPU3 differs in the gradients; replayed" in text
    assert text.count("ab32") == text.count("gradients") == 1


def test_a_long_name_breaks_behind_its_dots_and_a_short_one_not() -> None:
    document = page(
        result(worker("GPU0"), summary="layers.0.attention_norm.weight of a.b"), story()
    )
    assert "layers.<wbr>0.<wbr>attention_<wbr>norm.<wbr>weight of a.b" in document


def test_every_table_has_a_caption_and_names_its_columns_and_rows() -> None:
    document = page(failed(), story("GPU0"))
    num = document.count("<table")
    assert document.count("<caption") == num > 0
    assert document.count('<th scope="col">worker</th>') == num
    assert '<th scope="row">GPU0</th>' in document


def test_each_gpu_has_its_heat_and_power_as_curves_in_its_row() -> None:
    gpus, records = {}, {}
    for name, hottest in (("GPU0", 60), ("GPU1", 80)):
        gpus[name], records[name] = GpuCurves(began_ns=0), Record()
        for second in range(9):
            sample = Telemetry(t=second * 10**9, temperature_c=hottest - 8 + second, power_w=300.0)
            gpus[name].record(sample)
            records[name].record(sample)
    rows = [worker(name, gpu=GPU, telemetry=records[name].health()) for name in gpus]
    document = page(result(*rows), story(*gpus, gpus=gpus))
    row = re.findall(r"<tr>.*?</tr>", document)[1]
    assert "NVIDIA H100<br>GPU-1234abcd<br>bus 00000000:3B:00.0, serial 1650000000003" in row
    assert 'aria-label="GPU0, hottest 60 °C"' in row
    assert "300 W</td>" in row
    assert row.count('<path class="usual u0 open"') == 2


def test_a_run_that_ended_before_it_had_workers_has_its_page() -> None:
    """Another node of its job was absent."""
    html = page(result(verdict=Verdict.INCONCLUSIVE, summary="node b did not come"), story())
    assert "node b did not come" in Tags(html).text
