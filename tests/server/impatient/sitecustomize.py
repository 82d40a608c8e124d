"""On the path of a server, it gives Ray up sooner, and looks for a worker that is away more often."""

from twinphase.cluster import pools
from twinphase.engine import host

pools.LOST_SECONDS, pools.REPLY_SECONDS = 4.0, 2.0
host.LONGEST_DELAY = 1.0
