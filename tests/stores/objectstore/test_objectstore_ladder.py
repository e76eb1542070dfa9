"""The ladder on the torch engine with one S3 bucket behind two servers: separate processes, a real SeaweedFS."""

import pytest

ACCESS = {"AWS_ACCESS_KEY_ID": "test-access", "AWS_SECRET_ACCESS_KEY": "test-secret-0123456789"}


@pytest.mark.ladder
def test_a_bucket_that_two_servers_share_changes_no_output(seaweed, bucket, climb):
    climb(f"s3://{bucket}/ladder?endpoint={seaweed.endpoint}&timeout_s=20&deadline_ms=20000", **ACCESS)
