"""The ladder on the torch engine with one Mooncake pool behind two servers: separate processes in one namespace."""

import pytest


@pytest.mark.ladder
def test_a_pool_that_two_servers_share_changes_no_output(shared_cluster, inside, climb):
    options = shared_cluster.options()
    climb(
        f"mooncake://{options.master}?admin={options.admin}&lease_s={options.lease_s}&prefix=ladder&deadline_ms=20000"
    )
