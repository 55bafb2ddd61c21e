import json
from pathlib import Path

import pytest

from eyas.pipeline.chat import ChatEncoder
from eyas.pipeline.target_folder import TargetFolder, open_target
from eyas.pipeline.testing import make_tiny_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def target(tiny_target) -> TargetFolder:
    return open_target(str(tiny_target))


@pytest.fixture(scope="session")
def encoder(target) -> ChatEncoder:
    return ChatEncoder(target.tokenizer(), eos_ids=target.eos_ids)


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="chats.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write
