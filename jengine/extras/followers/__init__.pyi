# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.config.plugins import lazy_names as lazy_names
from jengine.extras.followers.follow_hook import FollowHook as FollowHook
from jengine.extras.followers.followed_loop import FollowedValLoop as FollowedValLoop
