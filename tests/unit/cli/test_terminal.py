"""The command on terminals, pipes and in scripts: version, completion, exit codes, colours, width, closed outputs."""

import os
import pty
import re
import subprocess
import sys

import pytest

from zephon import __version__

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
ESCAPE = "\x1b"


def run(*arguments, environment=(), **options):
    argv = [sys.executable, "-m", "zephon.cli", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm-256color", **dict(environment)}
    return subprocess.run(argv, env=environment, check=False, **options)


def on_a_terminal(*arguments, **environment):
    """Exit code, and what a terminal gets."""
    leader, follower = pty.openpty()
    argv = [sys.executable, "-m", "zephon.cli", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(argv, env=environment, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    parts = []
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux says so at the end
            break
        if not part:
            break
        parts.append(part)
    os.close(leader)
    return process.wait(), b"".join(parts).decode()


def common(corpus):
    return corpus / "recipe.toml", "--tokenizer", corpus / "tokenizer", "--seq-len", "32", "--microbatch-size", "2"


def test_version_is_one_line():
    ran = run("--version", capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"zephon {__version__}\n", "")


@pytest.mark.parametrize(
    "shell, words",
    [
        ("bash", {"COMP_WORDS": "zephon st", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "zephon st"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "zephon st", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_shells_complete_commands(shell, words):
    program = "import sys; sys.argv[0] = 'zephon'; from zephon.cli import main; main()"
    environment = {**os.environ, "_ZEPHON_COMPLETE": f"complete_{shell}", **words}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "stream" in ran.stdout and "verify" not in ran.stdout


def test_options_are_completed_and_the_script_for_a_shell_is_printed():
    program = "import sys; sys.argv[0] = 'zephon'; from zephon.cli import main; main()"
    words = {"_ZEPHON_COMPLETE": "complete_bash", "COMP_WORDS": "zephon stream --micro", "COMP_CWORD": "2"}
    argv = [sys.executable, "-c", program]
    ran = subprocess.run(argv, env={**os.environ, **words}, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["--microbatch-size"]
    words = {"_ZEPHON_COMPLETE": "source_bash"}
    ran = subprocess.run(argv, env={**os.environ, **words}, capture_output=True, text=True, check=True)
    assert "complete " in ran.stdout and "zephon" in ran.stdout


def test_exit_codes_are_those_of_the_page(corpus, runs, zephon):
    assert zephon("stream", *common(corpus), "--steps", "2")[0] == 0
    assert zephon("verify", runs["one"], runs["other"], "--global-batch", "8")[0] == 1
    for arguments in (
        ("stream", corpus / "no.toml", *common(corpus)[1:]),
        ("stream", *common(corpus), "--no-such-option"),
        ("nothing",),
    ):
        ran = run(*arguments, capture_output=True, text=True)
        assert ran.returncode == 2 and "Traceback" not in ran.stderr and not ran.stdout
    assert zephon("stream", corpus / "no.toml", *common(corpus)[1:])[2].startswith("error: ")


def test_colours_are_for_terminals_that_want_them(corpus):
    code, told = on_a_terminal("--help", COLUMNS="100")
    assert code == 0 and COLOUR.search(told)
    code, told = on_a_terminal("--help", COLUMNS="100", NO_COLOR="1")
    assert code == 0 and "stream" in told and not COLOUR.search(told)
    for arguments in (("--help",), ("stream", *common(corpus), "--steps", "3"), ("stream", "--no-such-option")):
        ran = run(*arguments, capture_output=True, text=True)
        assert ESCAPE not in ran.stdout + ran.stderr and "\r" not in ran.stdout + ran.stderr


def test_a_narrow_terminal_gets_narrow_help_and_no_broken_line_of_progress(corpus):
    code, told = on_a_terminal("stream", "--help", COLUMNS="40")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", told)
    options = {"--restore", "--microbatch-size", "--canonical-replicas"}
    assert code == 0 and options <= set(re.findall(r"--[\w-]+", plain)), "names of options are not cut"
    assert max(len(line) for line in plain.splitlines()) <= 50  # the least that click writes
    code, told = on_a_terminal("stream", *common(corpus), "--steps", "400", COLUMNS="40")
    assert code == 0 and "records" in told
    for rewritten in re.findall(r"\r([^\r\n]*?)\x1b\[K", told):
        assert len(rewritten) < 40


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "| true"])
def test_a_closed_output_is_no_error_of_python(corpus, closed):
    arguments = " ".join(map(str, common(corpus)))
    line = f"{sys.executable} -m zephon.cli stream {arguments} --steps 2 {closed}"
    ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr
    assert ran.returncode == 0
