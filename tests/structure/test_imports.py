"""Who may import whom, and that nothing needs an optional package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"modules", "datamodules", "workbench"}
MAY_IMPORT = {
    "modules": {"modules"},
    "datamodules": {"datamodules", "modules.batch"},
    "workbench": PACKAGES,
}
OPTIONAL = ("flash_attn", "ray", "lm_eval", "liger_kernel", "transformers", "huggingface_hub", "selenium", "gguf")


def imported_names(file: Path) -> set[str]:
    """Absolute names of our own modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import hides the direction"
            names.add(node.module or "")
    return {name for name in names if name.split(".")[0] in PACKAGES | {"tests"}}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_point_one_way(package):
    allowed = MAY_IMPORT[package]
    for file in (ROOT / package).rglob("*.py"):
        for name in imported_names(file):
            fits = any(name == target or name.startswith(f"{target}.") for target in allowed)
            assert fits, f"{file.relative_to(ROOT)} imports {name}"


def test_everything_imports_without_optional_packages():
    """A fresh interpreter in which the optional packages cannot be found imports every module of ours."""
    modules = sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
    )
    script = f"""
import importlib, importlib.metadata, sys
find = importlib.metadata.distribution
def distribution(name):  # libraries also ask the metadata whether an optional package is there
    if name.replace("-", "_").lower() in {OPTIONAL!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)
importlib.metadata.distribution = distribution
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
for name in {modules!r}:
    importlib.import_module(name)
print("imported", len({modules!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"imported {len(modules)}"


def test_help_imports_nothing_heavy():
    """`--help` answers in under half a second because these stay out."""
    script = (
        "import sys; import workbench.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded.isdisjoint({"torch", "lightning", "mlflow", "omegaconf", "numpy"})


def test_a_dry_run_imports_no_lightning(tmp_path):
    script = f"""
import sys
from pathlib import Path
from workbench.plan import plan
from workbench.sweep_file import read_sweep
decided = plan(read_sweep(Path('sweeps/quickstart.yaml')), {{}}, home=Path({str(tmp_path)!r}), tokenise=False)
assert len(decided.trials) == 16
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()).isdisjoint({"lightning", "mlflow", "torchmetrics"})
    assert list(tmp_path.iterdir()) == []


def test_the_forkserver_preloads_what_a_trial_needs():
    """What a trial imports beyond this, every trial pays for again (MLflow alone is 1500 modules and three seconds)."""
    script = (
        "import workbench.preload, sys, tempfile; before = set(sys.modules)\n"
        "from pathlib import Path; from workbench.tracking import Tracker\n"
        "Tracker(Path(tempfile.mkdtemp()), 'e')\n"
        "print(len(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
