//! The command line of the reference VMM.

fn main() {}
