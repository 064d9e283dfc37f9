"""The contracts of ledger and rollout store on S3: moto's server, over HTTP, by s3fs.

What they rest on there is the conditional PUT (If-None-Match), which moto has since its pull request 8109 of 2024. A
whole run keeps to a local directory (`runs_dir`): Megatron writes checkpoints with file calls of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from storage.address import Address
from storage.commits import new_attempt
from storage.ledger import Ledger
from tests.contracts.test_ledger_contract import LedgerContract, commit_at
from tests.contracts.test_rollout_store_contract import StoreContract

boto3 = pytest.importorskip("boto3")
moto_server = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="runs")
        s3fs.S3FileSystem.clear_instance_cache()
        yield "s3://runs"
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


class TestS3Ledger(LedgerContract):
    @pytest.fixture
    def url(self, bucket: str, tmp_path: Path) -> str:
        return f"{bucket}/{uuid.uuid4().hex}/ledger"

    def test_of_racing_threads_one_wins(self, url: str) -> None:
        for step in range(5):
            attempts = [replace(commit_at(Address("score", step)), attempt=new_attempt(i)) for i in range(8)]
            with ThreadPoolExecutor(8) as threads:
                winners = list(threads.map(Ledger(url).commit, attempts))
            assert len({winner.attempt for winner in winners}) == 1
            assert Ledger(url).find(Address("score", step)) == winners[0]


@pytest.mark.full  # `make test` has it on local directories
class TestS3Store(StoreContract):
    @pytest.fixture
    def url(self, bucket: str, tmp_path: Path) -> str:
        return f"{bucket}/{uuid.uuid4().hex}/run"
