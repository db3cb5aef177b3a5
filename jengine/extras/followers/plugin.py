"""What this extra provides, by name and module: nothing is imported before it is used."""

provides = {
    "HOOKS": {"FollowHook": "jengine.extras.followers.follow_hook"},
    "LOOPS": {"FollowedValLoop": "jengine.extras.followers.followed_loop"},
    "commands": {"test --follow": "jengine.extras.followers.commands"},
    "config_checks": {"read_follow": "jengine.extras.followers.followed_loop"},
}
