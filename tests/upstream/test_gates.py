"""The gates pass on a sound set and name what is wrong otherwise."""

from __future__ import annotations

import pytest

from sglang_histate.upstream import UpstreamError, gates, hashes, scopes, series

SCHEDULER = "sglang/srt/scheduler.py"
STEP = "sglang.srt.scheduler:Scheduler.step"


@pytest.fixture
def subject(fake) -> gates.Subject:
    (fake.patches / "hooks.toml").write_text(
        '[hooks]\n"sglang.lang.api:<module>" = "sglang_histate/sizes.py"\n'
        f'"{STEP}" = ["sglang_histate/sizes.py"]\n"sglang.srt.scheduler:Scheduler" = '
        '"sglang_histate/__init__.py"\n'
    )
    made = gates.Subject.default(fake.site, fake.patches)
    gates.record(made)
    return made


def _findings(subject: gates.Subject) -> str:
    return "\n".join(finding for _, findings in gates.run_all(subject) for finding in findings)


def _replace(subject: gates.Subject, path: str, old: str, new: str) -> None:
    text = (subject.root / path).read_text()
    assert old in text
    (subject.root / path).write_text(text.replace(old, new))


def test_a_sound_set_passes(subject) -> None:
    assert _findings(subject) == ""


def test_patched_functions_are_found_from_the_hunks(subject) -> None:
    assert hashes.read_recorded(subject.folder).keys() == {
        "sglang.lang.api:<module>",
        "sglang.srt.deep.ops:op",
        "sglang.srt.scheduler:<module>",
        "sglang.srt.scheduler:Scheduler",
        "sglang.srt.scheduler:make",
        STEP,
    }


def test_a_changed_function_names_the_patch_and_our_file(subject) -> None:
    # A change far from the hunk: the patch still applies, only the hash can tell.
    _replace(subject, SCHEDULER, "def step(self, now):\n", "def step(self, now):\n        now = now + 0\n")
    (change, *_) = gates.hashes_match(subject)
    found = _findings(subject)
    assert (
        f"upstream changed {STEP}: re-read patches/histate/step-hook.patch, sglang_histate/sizes.py" in found
    )
    assert "upstream changed sglang.srt.scheduler:Scheduler: re-read sglang_histate/__init__.py" in found
    assert ":make" not in found and change.startswith("upstream changed")


def test_a_removed_function_names_the_patch(subject) -> None:
    _replace(subject, SCHEDULER, "def make():", "def create():")
    assert (
        "upstream no longer has sglang.srt.scheduler:make: re-read patches/histate/make-hook.patch"
        in _findings(subject)
    )


def test_a_changed_hook_alone_is_named(subject) -> None:
    _replace(subject, "sglang/lang/api.py", "VALUE = 1", "VALUE = 2")
    assert _findings(subject) == "upstream changed sglang.lang.api:<module>: re-read sglang_histate/sizes.py"


def test_an_unrelated_change_is_silent(subject) -> None:
    _replace(subject, "sglang/srt/plain.py", "True", "False")
    assert _findings(subject) == ""


def test_a_patch_that_no_longer_applies_is_named(subject) -> None:
    _replace(subject, SCHEDULER, "        first.run(now)\n", "        first.run(now, 1)\n")
    found = _findings(subject)
    assert "patches/histate/step-hook.patch does not apply: hunk 1" in found
    assert f"upstream changed {STEP}: re-read patches/histate/step-hook.patch" in found


def test_a_new_patch_must_be_recorded(subject, fake) -> None:
    fake.add_patch(
        "histate", "depth.patch", {SCHEDULER: ("return len(self.queue)", "return len(self.queue) + 1")}
    )
    assert "Scheduler.depth is used by patches/histate/depth.patch but not recorded" in _findings(subject)
    gates.record(subject)
    assert _findings(subject) == ""


def test_a_patch_that_breaks_the_syntax_is_found(subject, fake) -> None:
    fake.add_patch("cpu", "bad.patch", {"sglang/srt/plain.py": ("PLAIN = True", "PLAIN = (")})
    assert "sglang/srt/plain.py is not valid Python" in _findings(subject)


def test_a_patch_that_applies_twice_is_found(subject, fake) -> None:
    path = subject.folder / "cpu/twice.patch"
    header = (subject.folder / "cpu/cpu-op.patch").read_text().partition("--- ")[0]
    path.write_text(header + "--- a/sglang/data.txt\n+++ b/sglang/data.txt\n@@ -0,0 +1 @@\n+more\n")
    with open(subject.folder / "cpu/series", "a") as file:
        file.write("twice.patch\n")
    assert _findings(subject) == "patches/cpu/twice.patch applies twice: give it more context"


def test_hooks_name_files_that_exist(subject) -> None:
    hooks = subject.folder / "hooks.toml"
    hooks.write_text(hooks.read_text().replace("sglang_histate/__init__.py", "sglang_histate/gone.py"))
    assert "hooks.toml says sglang_histate/gone.py relies on sglang.srt.scheduler:Scheduler" in _findings(
        subject
    )


def test_recording_a_hook_that_upstream_lacks_is_refused(subject) -> None:
    hooks = subject.folder / "hooks.toml"
    hooks.write_text(hooks.read_text() + '"sglang.srt.scheduler:gone" = "sglang_histate/sizes.py"\n')
    with pytest.raises(UpstreamError, match=r"upstream has no sglang\.srt\.scheduler:gone"):
        gates.record(subject)


def test_a_root_without_sglang_is_refused(tmp_path, fake) -> None:
    with pytest.raises(UpstreamError, match="holds no sglang/ folder"):
        gates.Subject.default(tmp_path / "cache", fake.patches)


def test_scopes() -> None:
    source = (
        "import a\n\n\nclass C:\n    x = 1\n\n    @property\n    def p(self):\n        return 1\n\n"
        "    @p.setter\n    def p(self, v):\n        def inner():\n            pass\n\n    class D:\n"
        "        def q(self): pass\n\n\nif a:\n    def f():\n        pass\n"
    )
    found = scopes.Scopes(source, "c.py")
    expected = {1: "<module>", 4: "C.<body>", 5: "C.<body>", 7: "C.p", 9: "C.p", 14: "C.p", 16: "C.D.<body>"}
    expected |= {17: "C.D.q", 20: "<module>", 21: "f", 99: "<module>"}
    assert {line: found.of_line(line) for line in expected} == expected
    assert "C" in found and "C.<body>" in found and "C.inner" not in found
    # Both halves of a property count, and blank lines do not.
    other = scopes.Scopes("\n\n" + source.replace("pass\n\n    class", "return 2\n    class"), "c.py")
    changed = {
        name
        for name in ("<module>", "C", "C.<body>", "C.p", "C.D.q", "f")
        if found.digest(name) != other.digest(name)
    }
    assert changed == {"C", "C.p"}
    with pytest.raises(UpstreamError, match=r"c\.py is not valid Python at line 1"):
        scopes.Scopes("def", "c.py")


def test_a_method_that_a_patch_adds_counts_as_its_class(subject, fake) -> None:
    fake.add_patch(
        "histate",
        "new-method.patch",
        {SCHEDULER: ("    @property\n", "    def extra(self):\n        return 1\n\n    @property\n")},
    )
    found = hashes.patched_scopes(series.read_group("histate", fake.patches), fake.site)
    assert found["sglang.srt.scheduler:Scheduler.<body>"] == {"patches/histate/new-method.patch"}
