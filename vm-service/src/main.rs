//! The command line of the reference VMM.

use std::process::ExitCode;

fn main() -> ExitCode {
    vm_service::cli::main()
}
