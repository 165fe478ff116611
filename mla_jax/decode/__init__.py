"""The decode loop: state, one jitted step, and generation on top."""
