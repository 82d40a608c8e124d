"""On a server's path: gives up Ray sooner, and looks for lost workers more often."""

from twinphase.cluster import pools
from twinphase.engine.process import host

pools.LOST_SECONDS = 4.0
pools.REPLY_SECONDS = 2.0
host.LONGEST_DELAY = 1.0
