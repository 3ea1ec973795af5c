//! The init process of the testbed's machines, L1 and Linux guests in L2.

fn main() {
    testbed::agent::main();
}
