//! `bridge`: CUDA programs of machines without a GPU.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use vm_bridge::calls::{MODES, Mode};
use vm_bridge::consumers::{CONSUMERS, names, reason};
use vm_bridge::recording::{Difference, Report};
use vm_cuda_api::FUNCTIONS;

use super::boot::waivers;
use crate::api::{Body, BridgedConsumer, BridgedFunction, ReplayedCall};
use crate::cli::context::Context;
use crate::config::{MIN_HOST_MEMORY, parse_deadline, parse_size, parse_time_slice};
use crate::cuda_bridge;
use crate::failure::Failure;
use crate::os::sandbox::Measure;

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
    /// Make the calls of a recorded program before a driver again, and compare what they are answered
    Replay(ReplayArgs),
    /// List the CUDA driver's functions, each with how it crosses the bridge
    Coverage(CoverageArgs),
}

#[derive(Debug, Args)]
struct CoverageArgs {
    /// Only those that a library above the driver names, and how many of them cross
    #[arg(long, value_name = "LIBRARY", value_parser = consumers())]
    of: Option<String>,
}

fn consumers() -> PossibleValuesParser {
    PossibleValuesParser::new(names())
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// The socket, which programs are told by VM_BRIDGE=unix:PATH
    #[arg(long, value_name = "PATH", default_value = "/run/vm-bridge.sock")]
    socket: PathBuf,
    /// Serve programs whose connections carry no files by this socket too: VM_BRIDGE=stream:PATH, or whatever is forwarded to it
    #[arg(long, value_name = "PATH")]
    stream: Option<PathBuf>,
    /// Serve programs of guests over vsock at this port too, which they are told by VM_BRIDGE=vsock:PORT
    // VMADDR_PORT_ANY, the highest number, is no port.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u32).range(0..=4_294_967_294))]
    vsock: Option<u32>,
    /// Serve programs of other machines by TLS too, which they are told by VM_BRIDGE=tls:HOST:PORT
    #[arg(long, value_name = "ADDRESS:PORT", requires_all = ["certificate", "key", "clients"])]
    tls: Option<SocketAddr>,
    /// The server's certificate, in PEM, with those between it and an authority's
    #[arg(long, value_name = "FILE", requires = "tls")]
    certificate: Option<PathBuf>,
    /// The key of that certificate
    #[arg(long, value_name = "FILE", requires = "tls")]
    key: Option<PathBuf>,
    /// Certificates of the authorities that sign those of programs: no other program is served by TLS
    #[arg(long, value_name = "FILE", requires = "tls")]
    clients: Option<PathBuf>,
    /// Memory that programs by --stream and --vsock share with their workers, as in 256M
    #[arg(long, value_name = "SIZE", value_parser = size)]
    window: Option<u64>,
    /// The most device memory that programs may have together, as in 2G
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<u64>,
    /// The most host memory that the worker of each program may hold for it, as in 4G; by default as much as --memory, but at least 256M, and 4G without it
    #[arg(long, value_name = "SIZE", value_parser = host_memory)]
    host_memory: Option<u64>,
    /// End programs whose work on the device makes no progress for so long, as in 2s
    #[arg(long, value_name = "TIME", value_parser = parse_deadline)]
    deadline: Option<Duration>,
    /// How long of every 100 ms programs may keep the device busy together, from 1ms to 100ms
    #[arg(long, value_name = "TIME", value_parser = parse_time_slice)]
    time_slice: Option<Duration>,
    /// Record each program into a file of this folder, which `replay` reads: its calls with their parameters, its kernels, the results, and the first 512 bytes of each copy
    #[arg(long, value_name = "FOLDER")]
    record: Option<PathBuf>,
    /// The most bytes of a recording, at which it ends
    #[arg(long, value_name = "SIZE", value_parser = record_size, requires = "record", default_value = "256M")]
    record_limit: u64,
    /// The most bytes of all files in that folder; programs beyond are served without a recording
    #[arg(long, value_name = "SIZE", value_parser = size, requires = "record", default_value = "4G")]
    record_total: u64,
    #[command(flatten)]
    driver: DriverArgs,
}

/// The driver that workers open.
#[derive(Debug, Args)]
struct DriverArgs {
    /// The CUDA driver's library
    #[arg(long, value_name = "LIBRARY", default_value = "libcuda.so.1")]
    driver: PathBuf,
    /// Serve although workers cannot have these parts of their confinement: user, files, calls
    #[arg(long, value_delimiter = ',', value_name = "MEASURES", value_parser = waivers(&Measure::ALL))]
    unconfined: Vec<Measure>,
}

#[derive(Debug, Args)]
struct ReplayArgs {
    /// The recording
    file: PathBuf,
    /// The most device memory that it may have, as in 2G
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    memory: Option<u64>,
    /// End it when its work on the device makes no progress for so long, as in 2s
    #[arg(long, value_name = "TIME", value_parser = parse_deadline)]
    deadline: Option<Duration>,
    #[command(flatten)]
    driver: DriverArgs,
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

/// Parses a budget of host memory. The minimum suffices for a program with a few threads.
fn host_memory(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Ok(bytes) if bytes >= MIN_HOST_MEMORY => Ok(bytes),
        Ok(_) => Err("is less than 32M".into()),
        Err(error) => Err(format!("{text} {error}")),
    }
}

/// The most bytes of a recording: what a replay reads has fewer than 2 GiB.
fn record_size(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes if (4 << 10..2 << 30).contains(&bytes) => Ok(bytes),
        _ => Err("is not from 4K to 2047M".into()),
    }
}

impl BridgeArgs {
    /// Whether it only prints.
    pub(crate) fn only_reads(&self) -> bool {
        matches!(self.action, Action::Coverage(_))
    }
}

fn size(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Ok(0) => Err("is 0".into()),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(format!("{text} {error}")),
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
        Action::Serve(args) if args.stream.as_ref() == Some(&args.socket) => {
            Err(Failure::usage("`--stream` and `--socket` name the same file; choose two files"))
        }
        Action::Serve(args) if args.window.is_some() && args.stream.is_none() && args.vsock.is_none() => {
            Err(Failure::usage(
                "`--window` serves programs of `--stream` and `--vsock` only; add one of these options",
            ))
        }
        Action::Serve(args) => {
            let tls = match (args.tls, &args.certificate, &args.key, &args.clients) {
                (Some(address), Some(certificate), Some(key), Some(clients)) => Some(cuda_bridge::Tls {
                    address,
                    certificate: certificate.clone(),
                    key: key.clone(),
                    clients: clients.clone(),
                }),
                _ => None,
            };
            let places = cuda_bridge::Places {
                socket: args.socket.clone(),
                stream: args.stream.clone(),
                vsock: args.vsock,
                tls,
                window: args.window,
            };
            let limits = cuda_bridge::Limits {
                memory: args.memory,
                host_memory: args.host_memory,
                deadline: args.deadline,
                time_slice: args.time_slice,
            };
            let record = args.record.clone().map(|folder| cuda_bridge::RecordOptions {
                folder,
                limit: args.record_limit,
                total: args.record_total,
            });
            let DriverArgs { driver, unconfined } = &args.driver;
            cuda_bridge::serve(&context.program, &places, driver, unconfined, &limits, record.as_ref())
                .map_err(Failure::failed)
        }
        Action::Replay(args) => replay(context, args),
        Action::Coverage(args) => coverage(context, args.of.as_deref()),
    }
}

/// Replays, and says what was answered in another way.
fn replay(context: &mut Context<'_>, args: &ReplayArgs) -> Result<(), Failure> {
    let limits = cuda_bridge::Limits {
        memory: args.memory,
        deadline: args.deadline,
        ..cuda_bridge::Limits::default()
    };
    let DriverArgs { driver, unconfined } = &args.driver;
    let report = cuda_bridge::replay(&context.program, &args.file, driver, unconfined, &limits);
    let report = report.map_err(Failure::failed)?;
    let mut text = String::new();
    for Difference { call, function, recorded, replayed } in &report.differences {
        let answer = |(code, len): &(u32, usize)| format!("{code} with {len} bytes");
        text += &format!("{call} {function}: {}, recorded {}\n", answer(replayed), answer(recorded));
    }
    let Report { calls, answers, different, .. } = report;
    text += &format!("{calls} calls, {answers} answers, {different} different\n");
    let differences = report.differences.into_iter().map(|difference| ReplayedCall {
        call: difference.call,
        function: difference.function,
        code: difference.replayed.0,
        recorded_code: difference.recorded.0,
        bytes: difference.replayed.1,
        recorded_bytes: difference.recorded.1,
    });
    let differences = differences.collect();
    context.print(|| Body::Replay { calls, answers, different, differences }, || text)?;
    match different {
        0 => Ok(()),
        _ => Err(Failure::failed(format!("{different} of {answers} answers are not as recorded"))),
    }
}

/// Lists functions.
fn coverage(context: &mut Context<'_>, of: Option<&str>) -> Result<(), Failure> {
    let consumer = CONSUMERS.iter().find(|consumer| Some(consumer.name.as_str()) == of);
    let all: Vec<_> = (0..FUNCTIONS.len()).collect();
    let functions = consumer.map_or(&all, |consumer| &consumer.functions).iter().map(|&at| BridgedFunction {
        name: FUNCTIONS[at].name.clone(),
        since: FUNCTIONS[at].since,
        crosses: MODES[at].text().to_owned(),
        reason: if MODES[at] == Mode::Unsupported { reason(&FUNCTIONS[at].name) } else { None },
    });
    let functions: Vec<_> = functions.collect();
    let mut text = String::new();
    for BridgedFunction { name, crosses, reason, .. } in &functions {
        let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        text += &format!("{crosses:<24} {name}{reason}\n");
    }
    let of = consumer.map(|consumer| BridgedConsumer {
        name: consumer.name.clone(),
        packages: consumer.packages.clone(),
        names: consumer.functions.len(),
        supported: consumer.supported(),
    });
    if let Some(BridgedConsumer { name, packages, names, supported }) = &of {
        text += &format!("{supported} of {names} functions that {name} names ({})\n", packages.join(", "));
    }
    context.print(|| Body::Bridge { of, functions }, || text)
}
