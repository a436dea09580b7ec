"""flake.nix parses, and offers every kernel of build.toml under its name.

Its one input is stubbed: what kernel-builder would return says what it was asked for. So nothing is
fetched or built, and neither a network nor a nix daemon is needed.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monorepo.manifest import Manifest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    shutil.which("nix-instantiate") is None,
    reason="nix-instantiate is not installed (Debian: apt-get install nix-bin)",
)

# As kernel-builder answers: by output, then by system. A package is a record of the call here.
SYSTEMS = ("aarch64-darwin", "aarch64-linux", "x86_64-linux")
STUBBED_OUTPUTS = """
  flake:
  let
    self = "the flake itself";
    kernel-builder.lib.genKernelFlakeOutputs =
      { self, path }:
      let
        record = system: output: { inherit self system output; path = toString path; };
        bySystem = make: builtins.listToAttrs (
          map (name: { inherit name; value = make (record name); }) SYSTEMS
        );
      in
      {
        devShells = bySystem (record: {
          default = record "default";
          test = record "test";
          devShells.torch-cuda = record "devShells.torch-cuda";
        });
        packages = bySystem (record: {
          bundle = record "bundle";
          build-and-upload = record "build-and-upload";
          backendBundle.cuda = record "backendBundle.cuda";
        });
      };
  in
  flake.outputs { inherit self kernel-builder; }
""".replace("SYSTEMS", f"[ {' '.join(map(json.dumps, SYSTEMS))} ]")


def instantiate(tmp_path: Path, *arguments: str | Path) -> str:
    environment = os.environ | {
        variable: str(tmp_path / directory)
        for variable, directory in (
            ("HOME", "home"),
            ("XDG_CACHE_HOME", "cache"),
            ("NIX_STATE_DIR", "state"),
            ("NIX_LOG_DIR", "log"),
            ("NIX_CONF_DIR", "conf"),
        )
    }
    command = ["nix-instantiate", "--store", "dummy://", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def outputs(root: Path, tmp_path: Path) -> dict[str, Any]:
    evaluated: dict[str, Any] = evaluate(tmp_path, f"({STUBBED_OUTPUTS}) {flake(root)}")
    return evaluated


def evaluate(tmp_path: Path, expression: str) -> Any:
    text = instantiate(tmp_path, "--eval", "--strict", "--json", "--expr", expression)
    return json.loads(text)


def flake(root: Path) -> str:
    return f"(import (/. + {json.dumps(str(root))} + /flake.nix))"


def expected_outputs(root: Path, names: list[str]) -> dict[str, Any]:
    def by_system(make: Any) -> dict[str, Any]:
        return {
            system: {
                output: content for name in names for output, content in make(name, system).items()
            }
            for system in SYSTEMS
        }

    def record(name: str, system: str, output: str) -> dict[str, str]:
        path = str(root / name)
        return {"self": "the flake itself", "path": path, "system": system, "output": output}

    def packages(name: str, system: str) -> dict[str, Any]:
        return {
            f"{name}-bundle": record(name, system, "bundle"),
            f"{name}-build-and-upload": record(name, system, "build-and-upload"),
        }

    def shells(name: str, system: str) -> dict[str, Any]:
        return {
            name: record(name, system, "default"),
            f"{name}-test": record(name, system, "test"),
        }

    def everything(name: str, system: str) -> dict[str, Any]:
        return {
            name: {
                "bundle": record(name, system, "bundle"),
                "build-and-upload": record(name, system, "build-and-upload"),
                "backendBundle": {"cuda": record(name, system, "backendBundle.cuda")},
            }
        }

    return {
        "packages": by_system(packages),
        "devShells": by_system(shells),
        "legacyPackages": by_system(everything),
    }


def test_it_parses(tmp_path: Path) -> None:
    assert instantiate(tmp_path, "--parse", ROOT / "flake.nix")


def test_its_only_input_is_kernel_builder(tmp_path: Path) -> None:
    inputs = evaluate(tmp_path, f"{flake(ROOT)}.inputs")
    assert inputs.keys() == {"kernel-builder"}
    assert inputs["kernel-builder"]["url"].startswith("github:huggingface/kernels/v")


def test_it_offers_each_kernel_of_the_manifest_by_name(tmp_path: Path) -> None:
    names = [kernel.name for kernel in Manifest.load(ROOT).kernels]
    assert outputs(ROOT, tmp_path) == expected_outputs(ROOT, names)


def test_it_offers_several_kernels_side_by_side(tmp_path: Path) -> None:
    root = tmp_path / "monorepo"
    root.mkdir()
    shutil.copy(ROOT / "flake.nix", root)
    (root / "build.toml").write_text('[monorepo]\nkernels = ["one", "moe-dispatch"]\n')
    assert outputs(root, tmp_path) == expected_outputs(root, ["one", "moe-dispatch"])
