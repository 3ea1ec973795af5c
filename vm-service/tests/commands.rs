//! The command line, end to end on simulated hosts.

#[path = "commands/attach.rs"]
mod attach;
#[path = "commands/benchmark.rs"]
mod benchmark;
#[path = "commands/capture.rs"]
mod capture;
#[path = "commands/claims.rs"]
mod claims;
#[path = "commands/config.rs"]
mod config;
#[path = "commands/config_nvml.rs"]
mod config_nvml;
#[path = "commands/egpu.rs"]
mod egpu;
#[path = "commands/explain_claim.rs"]
mod explain_claim;
#[path = "commands/gpu.rs"]
mod gpu;
#[path = "commands/host.rs"]
mod host;
#[path = "commands/kernels.rs"]
mod kernels;
#[path = "commands/list_info.rs"]
mod list_info;
#[path = "commands/log.rs"]
mod log;
#[path = "commands/monitor.rs"]
mod monitor;
#[path = "commands/run.rs"]
mod run;
#[path = "commands/schema.rs"]
mod schema;
#[path = "commands/sim.rs"]
mod sim;
#[path = "commands/sim_faults.rs"]
mod sim_faults;
#[path = "commands/slot.rs"]
mod slot;
#[path = "commands/terminal.rs"]
mod terminal;
#[path = "commands/usage.rs"]
mod usage;
#[path = "commands/vfs.rs"]
mod vfs;

use std::path::Path;

use vm_passthrough::Host;

/// What a command answered.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    exit: u8,
    out: String,
    err: String,
}

/// Runs `vm-service ARGS` on `host`.
fn vm_service(host: &Host, args: &str) -> Answer {
    let args = ["vm-service"].into_iter().chain(args.split_whitespace()).map(Into::into);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let program = Path::new(env!("CARGO_BIN_EXE_vm-service"));
    let exit = vm_service::cli::run(args, Some(host.clone()), program, &mut out, &mut err);
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Answer { exit, out: text(out), err: text(err) }
}

/// Checks all of the output of a command that succeeds.
#[track_caller]
fn check(host: &Host, args: &str, expect: &str) {
    let got = vm_service(host, args);
    assert_eq!((got.exit, got.err.as_str()), (0, ""), "{args}: {}", got.out);
    assert_eq!(got.out, expect.trim_start_matches('\n'), "{args} printed\n{}", got.out);
}

/// Checks the exit status and the error of a command that fails and prints nothing else.
#[track_caller]
fn check_error(host: &Host, args: &str, exit: u8, expect: &str) {
    let got = vm_service(host, args);
    assert_eq!((got.exit, got.out.as_str()), (exit, ""), "{args}: {}", got.err);
    assert_eq!(got.err, format!("error: {expect}\n"), "{args}");
}
