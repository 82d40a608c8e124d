"""On the path of a server, it gives Ray up sooner, and looks for a worker that is away more often."""

from twinphase.cluster import pools
from twinphase.engine.process import host

pools.LOST_SECONDS = 4.0
pools.REPLY_SECONDS = 2.0
host.LONGEST_DELAY = 1.0
