"""On a server's path: gives up Ray sooner, and looks for lost workers more often."""

from twinphase.cluster import pools
from twinphase.engine.process import host

pools.RAY_TIMEOUT_SECONDS = 4.0
pools.REPLY_TIMEOUT_SECONDS = 2.0
host.MAX_RETRY_SECONDS = 1.0
