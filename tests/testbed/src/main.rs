//! Boots the testbed and runs its scenarios.

fn main() {}
