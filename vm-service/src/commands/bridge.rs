//! `bridge`: CUDA programs of machines without a GPU.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use vm_bridge::calls::MODES;
use vm_cuda_api::FUNCTIONS;

use crate::bridge;
use crate::config::parse_size;
use crate::context::Context;
use crate::failure::Failure;
use crate::json::{Body, BridgedFunction};

/// Arguments of `bridge`.
#[derive(Debug, Args)]
pub(crate) struct BridgeArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Serve this machine's GPUs to CUDA programs that load the bridge's libcuda.so.1
    Serve(Box<ServeArgs>),
    /// List the CUDA driver's functions, each with how it crosses the bridge
    Coverage,
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// The socket, which programs are told by VM_BRIDGE=unix:PATH
    #[arg(long, value_name = "PATH", default_value = "/run/vm-bridge.sock")]
    socket: PathBuf,
    /// The most device memory that programs may have together, as in 2G
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<u64>,
    /// The CUDA driver's library
    #[arg(long, value_name = "LIBRARY", default_value = "libcuda.so.1")]
    driver: PathBuf,
}

/// A quota. The least is a block of the driver's.
fn memory(text: &str) -> Result<u64, String> {
    const LEAST: u64 = 2 << 20;
    match parse_size(text) {
        Ok(bytes) if bytes >= LEAST => Ok(bytes),
        Ok(_) => Err("is less than 2M".into()),
        Err(error) => Err(format!("{text} {error}")),
    }
}

impl BridgeArgs {
    /// Whether it only prints.
    pub(crate) fn only_reads(&self) -> bool {
        matches!(self.action, Action::Coverage)
    }
}

/// Serves, or lists.
///
/// # Errors
/// When the socket can't be made, the driver can't be opened, or the output can't be written.
pub(crate) fn run(context: &mut Context<'_>, args: &BridgeArgs) -> Result<(), Failure> {
    match &args.action {
        Action::Serve(_) if context.json => {
            Err(Failure::usage("`bridge serve` prints nothing; leave `--json` out"))
        }
        Action::Serve(args) => {
            let limits = bridge::Limits { memory: args.memory };
            let places = bridge::Places { socket: args.socket.clone(), vsock: None };
            bridge::serve(&context.program, &places, &args.driver, &limits).map_err(Failure::failed)
        }
        Action::Coverage => {
            let functions = FUNCTIONS.iter().zip(MODES.iter()).map(|(function, mode)| BridgedFunction {
                name: function.name.clone(),
                since: function.since,
                crosses: mode.text().to_owned(),
            });
            let functions: Vec<_> = functions.collect();
            let text = functions
                .iter()
                .map(|function| format!("{:<24} {}\n", function.crosses, function.name))
                .collect();
            context.print(|| Body::Bridge { functions }, || text)
        }
    }
}
