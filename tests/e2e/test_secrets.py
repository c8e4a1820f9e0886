"""No secret is in a text of ours: many forms, each with a canary of its own, in real runs; then
every file and the terminal are searched for each canary. What a worker writes is the worker's."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.data.lab import Answer, FakeHub, write_tokenizer
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT, TINY
from tests.e2e.starts import Start, run_each

ARGUMENTS: dict[str, Sequence[str]] = {
    "option and value": ("--wandb-key", "{}"),
    "option=value": ("--api-key={}",),
    "option in camel case": ("--clientSecret={}",),
    "value with blanks": ("--passphrase", "two {} words"),
    "short option": ("-p", "{}"),
    "short option, value attached": ("-p{}",),
    "user and password": ("-u", "somebody:{}"),
    "first assignment of a script": ("-c", "WANDB_API_KEY={} :"),
    "second assignment of a script": ("-c", "A=1 WANDB_API_KEY={} :"),
    "quoted assignment of a script": ("-c", "export PGPASSWORD='{} more'; :"),
    "assignment in a script in a script": ("-c", """bash -c "TOKEN='{}' :" """),
    "option in a script": ("-c", "curl --hf-token {} https://host"),
    "user and password in a script": ("-c", "curl -u somebody:{} https://host"),
    "short option in a script": ("-c", "sshpass -p {} ssh host"),
    "environment of a container": ("-e", "DB_PASS={}"),
    "assignment in an option": ("--env=API_TOKEN={}",),
    "property": ("-Dservice.secretKey={}",),
    "header": ("-H", "X-API-Key: {}"),
    "header without a blank": ("-H", "X-Auth-Token:{}"),
    "bearer": ("-H", "Authorization: Bearer {}"),
    "basic": ("-H", "Authorization: Basic {}"),
    "cookie": ("-H", "Cookie: {}"),
    "password of a URL": ("https://somebody:{}@host/path",),
    "user of a URL": ("https://{}@host/path",),
    "odd password of a URL": ("https://somebody:a/b@{}@host/path",),
    "query of a URL": ("https://host/path?access_token={}&page=1",),
    "signature of a URL": ("https://host/path?X-Amz-Signature={}",),
    "JSON": ("-d", '{{"password": "{}"}}'),
    "YAML": ("-d", "password: {}"),
    "ini": ("-c", "aws_secret_access_key = {}"),
    "openssl": ("-passin", "pass:{}"),
    "AWS": ("AKIA{upper}",),
    "GitHub, classic": ("ghp_{}",),
    "GitHub, fine": ("github_pat_{}",),
    "GitLab": ("glpat-{}",),
    "Slack": ("xoxb-12-{}",),
    "Hugging Face": ("hf_{}",),
    "OpenAI": ("sk-proj-{}",),
    "Stripe": ("sk_live_{}",),
    "Google": ("AIza{}",),
    "npm": ("npm_{}{}",),
    "JWT": ("eyJhbGciOi.{}.c2ln",),
    "PEM": ("-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",),
}
ENVIRONMENT = {
    "HF_TOKEN": "{}",
    "WANDB_API_KEY": "{}",
    "AWS_SECRET_ACCESS_KEY": "{}",
    "PGPASSWORD": "{}",
    "DB_PASS": "it's {}",
    "MYSQL_PWD": "{}",
    "SIGNING_SECRET": "{}\nsecond line {}",
    "githubToken": "{}",
    "DATABASE_URL": "postgresql://somebody:{}@host/base",
    "PIP_INDEX_URL": "https://{}@host/simple",
}
SETTINGS: dict[str, Sequence[str]] = {
    "token as a setting": ("data.hf_token={}",),
    "key as a setting": ("training.api_key={}",),
    "key without a section": ("api_key={}",),
    "unknown option": ("--wandb-key={}",),
    "unknown option and value": ("--wandb-key", "{}"),
    "URL as a data set": ("data.dataset=https://somebody:{}@host/texts",),
    "token as a data set": ("data.dataset=hf_{}",),
    "query as a data set": ("data.dataset=https://host/texts?token={}",),
    "token as a tokenizer": ("data.tokenizer_path=/somewhere/github_pat_{}",),
    "URL as raw data": ("--raw-data", "https://somebody:{}@host/texts"),
    "token as a project": ("logging.wandb_project=glpat-{}",),
    "value of the environment": ("logging.wandb_project={HF_TOKEN}",),
}
FILES = {
    "key.json": '{{"service": {{"api_key": "{}"}}}}',
    "broken.json": '{{"service": {{"api_key": "{}" "b": 1}}}}',
    "broken.yaml": "service:\n  api_key: {}\n    b: [1\n",
    "broken.toml": 'api_key = "{}" b',
    "url.json": '{{"data": {{"dataset": "https://somebody:{}@host/texts"}}}}',
}
HUB = ("endpoint", ".env", "key in .env")
PEM = "-----BEGIN EC PRIVATE KEY-----\n{}\nOf{}\n-----END EC PRIVATE KEY-----"
LINES_IN_ENVIRONMENT = {
    "SSH_KEY": PEM,
    "IDENTITY": PEM,
    "GOOGLE_CREDENTIALS": '{{"private_key": "' + PEM.replace("\n", "\\n") + '"}}',
    "PGPASS": "{}",
    "A_SECRET": "  {}\r\nline of {}\r\n",
    "B_SECRET": 'it\'s "q\u00fcoted" {}',
}
LINES_IN_ARGUMENTS: dict[str, Sequence[str]] = {
    "PEM as a value": ("--identity", PEM),
    "PEM with escaped line ends": ("--identity", PEM.replace("\n", "\\n")),
    "PEM that a shell split": PEM.split(),
}
LINES_IN_OUTPUT = {
    "PEM without its begin": "\n".join([*["{}"] * 60, "-----END PRIVATE KEY-----"]),
    "PEM in JSON": '{{"pem": "' + PEM.replace("\n", "\\n") + '", "n": 1}}',
    "PEM without its end": PEM.rpartition("\n")[0],
    "block of YAML": "password: |\n  {}\n  of {}\nport: 1",
    ".netrc": "machine host\n login somebody\n password {}",
    ".pgpass": "host:5432:base:somebody:{}",
    "container": "- name: DB_PASSWORD\n  value: {}",
}
LINES = (*LINES_IN_ENVIRONMENT, *LINES_IN_ARGUMENTS, *LINES_IN_OUTPUT)


def canary(form: str) -> str:
    """Told apart from every other one, and from a word."""
    forms = [*ARGUMENTS, *ENVIRONMENT, *SETTINGS, *FILES, *HUB, *LINES]
    return f"Cnry{forms.index(form):03}Xq"


def filled(form: str, text: str, **more: str) -> str:
    value = canary(form)
    return text.format(*[value] * 60, upper=value.upper() + "A" * 8, **more)


def environment() -> dict[str, str]:
    plain = {n: v for n, v in os.environ.items() if not n.startswith(("CUDA_", "HF_"))}
    ours = {name: filled(name, text) for name, text in ENVIRONMENT.items()}
    return plain | ours | {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}


@dataclass
class Lab:
    """A directory for real runs, and what their terminals showed."""

    dir: Path
    terminal: str = ""
    unexpected: list[str] = field(default_factory=list)
    """What ended with another exit code than it should, or with a traceback."""
    found: bytes = b""
    """All that the runs showed and wrote."""

    def run(self, *arguments: str, env: Mapping[str, str] | None = None, code: int) -> None:
        command = [sys.executable, "-P", "-m", "launcher", *arguments]
        done = subprocess.run(
            command,
            cwd=self.dir,
            env=environment() | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
        )
        self.note(str(arguments), done.returncode, code, done.stdout.decode())

    def start_each(self, *starts: Sequence[str], env: Mapping[str, str], code: int) -> None:
        """Starts that end at once."""
        asked = {str(words): Start(self.dir, words) for words in starts}
        for what, ended in run_each(asked, environment() | dict(env)).items():
            self.note(what, ended.exit_code, code, ended.shown)

    def note(self, what: str, code: int, expected: int, shown: str) -> None:
        if code != expected or "Traceback" in shown:
            self.unexpected.append(f"{what}: {code}, not {expected}: {shown}")
        self.terminal += "".join(
            line for line in shown.splitlines(keepends=True) if not line.startswith("[CPU")
        )

    def config(self, name: str, text: str) -> str:
        (self.dir / "settings").mkdir(exist_ok=True)
        (self.dir / "settings" / name).write_text(text)
        return str(self.dir / "settings" / name)


def run_a_command(lab: Lab) -> None:
    """It fails, and its last words, which reports quote, are all that it was given."""
    arguments = [filled(form, text) for form, texts in ARGUMENTS.items() for text in texts]
    speak = (
        "import os, sys; [print(*(repr(w) for w in words[n:n + 5]))"
        " for words in [[*sys.argv, *os.environ.values()]]"
        " for n in range(0, len(words), 5)]; sys.exit(3)"
    )
    command = ("--", sys.executable, "-c", speak, *arguments)
    one = ("--device", "cpu", "--workers", "1")
    plans = [(*one, *extra, *command) for extra in (("--dry-run",), ("--dry-run", "--json"))]
    lab.start_each(*plans, env={}, code=0)
    lab.run(*one, "--run-dir", "command", *command, code=3)
    lab.run("report", "command", code=3)
    own = (lab.dir / "command" / "cpu0.log").read_text()
    for form in [*ARGUMENTS, *ENVIRONMENT]:
        assert canary(form) in own or canary(form).upper() in own, "written byte for byte"
    (lab.dir / "command" / "cpu0.log").unlink()


def run_a_command_that_says_lines(lab: Lab) -> None:
    """Each line of a secret is a last line of its own; the first ones are too many to be kept."""
    said = [filled(form, text) for form, text in LINES_IN_OUTPUT.items()]
    (lab.dir / "said.txt").write_text("\n".join(said) + "\n")
    environ = {name: filled(name, text) for name, text in LINES_IN_ENVIRONMENT.items()}
    arguments = [filled(form, t) for form, texts in LINES_IN_ARGUMENTS.items() for t in texts]
    (lab.dir / "say.py").write_text(
        "import json, os, sys\n"
        "print(open('said.txt').read(), end='')\n"
        f"texts = [os.environ[name] for name in {list(environ)}]\n"
        "print(*texts[:2], json.loads(texts[2])['private_key'].splitlines()[1], *texts[3:],\n"
        "    sys.argv[2].splitlines()[1], *sys.argv[3:], repr(texts[5]), json.dumps(texts[5]),\n"
        "    sep='\\n')\n"
        "sys.exit(3)\n"
    )
    two = ("--device", "cpu", "--workers", "2", "--run-dir", "said")
    history = lab.dir / "history.jsonl"
    kept = f"launch.history_file={history}"
    lab.run(*two, kept, "--", sys.executable, "say.py", *arguments, env=environ, code=3)
    lab.run("report", "said", code=3)
    lab.run("history", "--file", str(history), code=0)
    own = [lab.dir / "said" / f"cpu{number}.log" for number in range(2)]
    said = "".join(log.read_text() for log in own)  # the first that ends has the other one stopped
    assert all(canary(form) in said for form in LINES), "written byte for byte"
    report = json.loads((lab.dir / "said" / "report.json").read_text())
    assert any("port: 1" in worker["last_lines"] for worker in report["workers"])
    assert history.stat().st_size > 0
    for log in own:
        log.unlink()
    for name in ("say.py", "said.txt"):
        (lab.dir / name).unlink()


def run_refused(lab: Lab) -> None:
    values = environment()
    starts = [
        [*(filled(form, text, **values) for text in texts), "--dry-run"]
        for form, texts in SETTINGS.items()
    ]
    paths = [lab.config(form, filled(form, text)) for form, text in FILES.items()]
    starts += [["--config", path, "--run-dir", "refused"] for path in paths]
    lab.start_each(*starts, env={}, code=2)
    for path in paths:
        Path(path).unlink()


class TiredHub(FakeHub):
    """Its first download fails twice: huggingface_hub says so, and asks again."""

    refusals_left = 2

    def answer(self, path: str, wanted_range: str | None) -> Answer:
        if self.refusals_left and "/resolve/" in path:
            self.refusals_left -= 1
            return Answer(503)
        return super().answer(path, wanted_range)


def run_a_training(lab: Lab, hub: FakeHub) -> None:
    """The tokenizer comes from a hub with a password, whose token is in .env."""
    settings = json.loads(json.dumps(TINY))
    settings["training"]["save_last"] = True
    settings["model"]["model_path"] = "acme/tiny"
    (lab.dir / "a.txt").write_text("some words of a text " * 500)
    settings["data"] |= {"dataset": "a.txt", "tokenizer": "model", "cache_dir": "cache"}
    del settings["data"]["bpe_vocab_size"]
    config = lab.config("tiny.json", json.dumps(settings))
    dotenv = lab.dir / ".env"
    dotenv.write_text(f"HF_TOKEN={canary('.env')}\nWANDB_API_KEY={canary('key in .env')}\n")
    tokenizer = write_tokenizer(lab.dir / "tokenizer.json")
    hub.repos["models/acme/tiny"] = {"tokenizer.json": tokenizer.read_bytes()}
    hub.repos["datasets/acme/text"] = {}
    endpoint = hub.endpoint.replace("://", f"://somebody:{canary('endpoint')}@")
    env = {"HF_ENDPOINT": endpoint, "HF_HOME": str(lab.dir / "hf"), "HF_TOKEN": ""}
    ours = ("--config", config, "--workers", "1")
    lab.run(*ours, "data.dataset=acme/text", "--run-dir", "empty", env=env, code=2)
    lab.run(*ours, "model.model_path=acme/none", "--run-dir", "none", env=env, code=2)
    lab.run(*ours, "--run-dir", "training", env=env, code=0)
    shows = (("doctor",), ("config", "show"), ("config", "show", "--json"))
    lab.start_each(*((*show, "--config", config) for show in shows), env=env, code=0)
    dotenv.unlink()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("secrets"))
    run_a_command(lab)
    run_a_command_that_says_lines(lab)
    run_refused(lab)
    hub = TiredHub()
    try:
        run_a_training(lab, hub)
    finally:
        hub.stop()
    files = [path for path in lab.dir.rglob("*") if path.is_file() and "hf" not in path.parts]
    parts = [part for path in files for part in (str(path).encode(), path.read_bytes())]
    lab.found = b"\n".join([lab.terminal.encode(), *parts])
    return lab


@pytest.mark.parametrize("form", [*ARGUMENTS, *ENVIRONMENT, *SETTINGS, *FILES, *HUB, *LINES])
def test_no_text_of_ours_holds_a_secret(lab: Lab, form: str) -> None:
    for value in (canary(form), canary(form).upper()):
        at = lab.found.find(value.encode())
        assert at < 0, lab.found[max(0, at - 200) : at + 100]


def test_runs_end_as_they_would_without_secrets_and_settings_with_one_are_refused(lab: Lab) -> None:
    assert lab.unexpected == []
    for name in (
        "run.json",
        "report.html",
        "launcher.log",
        "prepare.log",
        "last.pt",
        "manifest.json",
    ):
        assert f"/{name}\n".encode() in lab.found


@pytest.mark.parametrize(
    "kept",
    ["--wandb-key", "WANDB_API_KEY=***", "somebody", "https://***@host/path", "thrown while"],
)
def test_what_is_no_secret_can_still_be_read(lab: Lab, kept: str) -> None:
    assert kept.encode() in lab.found
