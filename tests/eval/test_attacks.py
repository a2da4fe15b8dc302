"""Hostile programs must neither pass nor touch the host, whoever runs them and however."""

import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NOBODY = 65534

spec = importlib.util.spec_from_file_location("attack_programs", HERE / "attack_programs.py")
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)


@pytest.fixture(scope="module")
def open_python(tmp_path_factory):
    """An interpreter and our packages in a folder that every user may enter, or those we have."""
    folder = Path("/var/tmp") / f"laneformer-test-{secrets.token_hex(4)}"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    (folder / "bin").mkdir(parents=True)
    shutil.copy(os.path.realpath(sys.executable), folder / "bin" / "python")
    left_out = shutil.ignore_patterns(
        "site-packages", "test", "tests", "idlelib", "tkinter", "config-*", "__pycache__", "*.a"
    )
    shutil.copytree(base / "lib" / version, folder / "lib" / version, ignore=left_out)
    for library in base.glob("lib/libpython*.so*"):
        shutil.copy(library, folder / "lib")
    (folder / "lib" / version / "site-packages").mkdir()
    for package in ("eval", "laneformer_jax"):
        shutil.copytree(ROOT / package, folder / "code" / package, ignore=left_out)
    shutil.copy(HERE / "attack_driver.py", folder / "code")
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    yield folder
    shutil.rmtree(folder)


def run(order, folder, user):
    options = {"user": user, "group": user, "extra_groups": []} if user else {}
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
    if folder is None:
        command = [sys.executable, str(HERE / "attack_driver.py")]
        environment["PYTHONPATH"] = str(ROOT)
    else:
        command = [str(folder / "bin" / "python"), str(folder / "code" / "attack_driver.py")]
        environment |= {"PYTHONHOME": str(folder), "PYTHONPATH": str(folder / "code")}
    done = subprocess.run(
        command, input=json.dumps(order), capture_output=True, text=True, env=environment, **options
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def snapshot(folder):
    return {
        str(p): (p.stat().st_mode, p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else None)
        for p in [folder, *folder.rglob("*")]
    }


def programs_of(user):
    """Command lines of the user's processes that look like ours."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(x.split(":\t", 1) for x in status.read_text().splitlines() if ":\t" in x)
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if b"inside.launch" in command and (user is None or lines["Uid"].split()[0] == str(user)):
            found.append(command)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
@pytest.mark.parametrize("bubblewrap", [False, True], ids=["landlock+seccomp", "bubblewrap"])
@pytest.mark.parametrize("who", ["me", "ordinary user"])
@pytest.mark.slow
def test_attacks(who, bubblewrap, request, tmp_path_factory):
    if bubblewrap and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    if who == "ordinary user" and os.geteuid() != 0:
        pytest.skip("we are an ordinary user already")
    user = NOBODY if who == "ordinary user" else None
    folder = request.getfixturevalue("open_python") if user else None
    assert len(programs.ATTACKS) >= 40
    check(programs.ATTACKS, folder, user, bubblewrap)


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
@pytest.mark.smoke
def test_attacks_quick():
    names = ("exit in the function", "forged frames with the real secret", "equality patched")
    names += ("fork", "write", "TCP", "kill the victim", "frames and heap", "null pointer")
    check({name: programs.ATTACKS[name] for name in names}, None, None, bool(shutil.which("bwrap")))


def check(attacks, folder, user, bubblewrap):
    witness = Path("/var/tmp") / f"laneformer-witness-{secrets.token_hex(4)}"
    witness.mkdir()
    try:
        (witness / "precious").write_text("precious")
        witness.chmod(0o777)
        (witness / "precious").chmod(0o666)
        before = snapshot(witness)
        options = {"user": user, "group": user, "extra_groups": []} if user else {}
        victim = subprocess.Popen(["/bin/sleep", "1000"], **options)
        name = f"laneformer-{secrets.token_hex(4)}"
        with (
            socket.create_server(("127.0.0.1", 0)) as tcp,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
            socket.socket(socket.AF_UNIX) as unix,
        ):
            port = tcp.getsockname()[1]
            udp.bind(("127.0.0.1", port))
            unix.bind("\0" + name)
            unix.listen()
            facts = {"W": str(witness), "VICTIM": victim.pid, "PORT": port, "NAME": name}
            head = "".join(f"{key} = {value!r}\n" for key, value in facts.items())
            expected = [f"expected-{secrets.token_hex(16)}" for _ in range(2)]
            order = {
                "bubblewrap": bubblewrap,
                "expected": expected,
                "programs": {
                    "honest": f"def f(x): return {expected!r}[x - 1]",
                    **{n: head + programs.PRELUDE + code for n, code in attacks.items()},
                },
            }
            done = run(order, folder, user)
            for listener in (tcp, udp, unix):
                listener.setblocking(False)
                with pytest.raises(BlockingIOError):
                    listener.recv(1) if listener is udp else listener.accept()
        assert victim.poll() is None
        assert os.getpriority(os.PRIO_PROCESS, victim.pid) == 0
        victim.kill()
        victim.wait()
        assert snapshot(witness) == before
        assert done["level"] == ("namespaces+" if bubblewrap else "") + "landlock+seccomp"
        verdicts = done["verdicts"]
        assert verdicts.pop("honest")["passed"]
        assert {n: v for n, v in verdicts.items() if v["passed"]} == {}
        assert len(verdicts) == len(attacks)
        assert not programs_of(user) if user else True
    finally:
        shutil.rmtree(witness)
