//! Runs everything that needs a GPU and prints one table: tests, fuzzing, and figures against their peers.
//!
//! Each section runs in a process of its own, because a fault on the device ends a process's use of it. Without a GPU
//! every test is skipped, with the reason. The last line is `N passed, N failed, N skipped`.

mod allocations;
mod arena;
mod borrow;
mod capi;
mod checksum;
mod child;
mod chip;
mod conformance;
mod costs;
mod device;
mod driver;
mod faults;
mod figures;
mod filetests;
mod fuzz;
mod gpt;
mod gpu;
mod kernels;
mod library;
mod paravirt;
mod peer;
mod programs;
mod rates;
mod safety;
mod sanitizer;
mod service;
mod skip;
mod table;
mod telemetry;
mod tensor;
mod tiles;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use gpu::Gpu;
use table::{Outcome, Record, Report, Table};
use vm_jit::backend::ptx::Arch;

/// What a test does.
type Run = dyn Fn(&Gpu, &mut Report) -> anyhow::Result<()>;

/// One test of a section. It fails with its error, or when it panics; with [`skip::Skip`] as its error it is skipped.
struct Test {
    name: String,
    run: Box<Run>,
}

impl Test {
    fn new(name: impl Into<String>, run: impl Fn(&Gpu, &mut Report) -> anyhow::Result<()> + 'static) -> Self {
        Self { name: name.into(), run: Box::new(run) }
    }
}

impl Test {
    /// The same of code for another architecture, which the device runs by way of PTX.
    fn compiled_for(self, arch: Arch) -> Self {
        let run = self.run;
        Self::new(format!("{}, compiled for {arch}", self.name), move |gpu, report| {
            run(&gpu.compiling_for(arch)?, report)
        })
    }
}

/// What is selected by name.
struct Section {
    name: &'static str,
    about: &'static str,
    /// How long all its tests may take.
    timeout: Duration,
    /// All its tests; making the list needs no GPU.
    tests: fn(&Arguments) -> Vec<Test>,
}

impl Section {
    /// The tests that are selected.
    fn selected(&self, arguments: &Arguments) -> Vec<Test> {
        (self.tests)(arguments).into_iter().filter(|test| arguments.selects(&test.name)).collect()
    }
}

const SECTIONS: &[Section] = &[
    Section {
        name: "device",
        about: "what the driver says of the device, beside what its registers say",
        timeout: Duration::from_secs(60),
        tests: device::tests,
    },
    Section {
        name: "conformance",
        about: "the suite that every accelerator must pass",
        timeout: Duration::from_secs(120),
        tests: conformance::tests,
    },
    Section {
        name: "checksum",
        about: "copies that are checked at both ends, over links that flip bits, and what that costs",
        timeout: Duration::from_secs(240),
        tests: checksum::tests,
    },
    Section {
        name: "driver",
        about: "what only the CUDA accelerator has",
        timeout: Duration::from_secs(120),
        tests: driver::tests,
    },
    Section {
        name: "borrow",
        about: "kernels on a context, a stream and memory of another program's",
        timeout: Duration::from_secs(60),
        tests: borrow::tests,
    },
    Section {
        name: "safety",
        about: "what a guest's kernel can't do",
        timeout: Duration::from_secs(120),
        tests: safety::tests,
    },
    Section {
        name: "faults",
        about: "faults on the device, each in a process of its own",
        timeout: Duration::from_secs(240),
        tests: faults::tests,
    },
    Section {
        name: "filetests",
        about: "the kernels of vm-ir's filetests",
        timeout: Duration::from_secs(120),
        tests: filetests::tests,
    },
    Section {
        name: "service",
        about: "kernels from the builder and from the command line",
        timeout: Duration::from_secs(120),
        tests: service::tests,
    },
    Section {
        name: "fuzz",
        about: "random kernels against the interpreter",
        timeout: Duration::from_secs(420),
        tests: fuzz::tests,
    },
    Section {
        name: "sanitizer",
        about: "compute-sanitizer over the kernels of the filetests",
        timeout: Duration::from_secs(420),
        tests: sanitizer::tests,
    },
    Section {
        name: "paravirt",
        about: "guests that share the GPU",
        timeout: Duration::from_secs(420),
        tests: paravirt::tests,
    },
    Section {
        name: "figures",
        about: "compiling, launching and allocating against their peers",
        timeout: Duration::from_secs(240),
        tests: figures::tests,
    },
    Section {
        name: "rates",
        about: "launches in a second: the driver's own, the worker's, a guest's",
        timeout: Duration::from_secs(180),
        tests: rates::tests,
    },
    Section {
        name: "costs",
        about: "what ops take, beside what they are said to cost",
        timeout: Duration::from_secs(240),
        tests: costs::tests,
    },
    Section {
        name: "kernels",
        about: "kernels against PyTorch and a device copy",
        timeout: Duration::from_secs(240),
        tests: kernels::tests,
    },
    Section {
        name: "library",
        about: "the functions of the kernel library against their definitions",
        timeout: Duration::from_secs(600),
        tests: library::tests,
    },
    Section {
        name: "functions",
        about: "how fast the functions of the kernel library are, against a device copy and PyTorch",
        timeout: Duration::from_secs(480),
        tests: library::figures::tests,
    },
    Section {
        name: "capi",
        about: "the kernel library for C: every function on a caller's stream, what is refused, and what a call takes",
        timeout: Duration::from_secs(480),
        tests: capi::tests,
    },
    Section {
        name: "tiles",
        about: "tile kernels at odd shapes, with hostile boxes, and attention against cuDNN",
        timeout: Duration::from_secs(900),
        tests: tiles::tests,
    },
    Section {
        name: "products",
        about: "matrix products as their tables and the tuner choose them, against cuBLAS",
        timeout: Duration::from_secs(480),
        tests: tiles::products::tests,
    },
    Section {
        name: "gpt",
        about: "losses and gradients of a GPT-2 of the kernel library, against PyTorch's",
        timeout: Duration::from_secs(480),
        tests: gpt::tests,
    },
    Section {
        name: "gpt-training",
        about: "a training step of it, against PyTorch's compiled one",
        timeout: Duration::from_secs(420),
        tests: gpt::tests_of_training,
    },
    Section {
        name: "gpt-decoding",
        about: "the tokens that it generates, against PyTorch's compiled model",
        timeout: Duration::from_secs(240),
        tests: gpt::tests_of_decoding,
    },
    Section {
        name: "older-tiles",
        about: "tile kernels compiled for older architectures, which the device runs by way of PTX",
        timeout: Duration::from_secs(900),
        tests: tiles::tests_of_older,
    },
];

/// Runs everything that needs a GPU and prints one table.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpu")]
struct Arguments {
    /// Sections to run; all without any.
    sections: Vec<String>,
    /// Run only tests whose names have one of these parts.
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<String>,
    /// Say what there is, and run nothing.
    #[arg(long)]
    list: bool,
    /// Write everything that came out into this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The device's number in CUDA's order.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// How many random kernels to run.
    #[arg(long, default_value_t = 2000)]
    fuzz: u64,
    /// The number of the first random kernel.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Architectures of the section older-tiles.
    #[arg(long, value_delimiter = ',', default_value = "sm_75,sm_80,sm_89")]
    tiles_for: Vec<Arch>,
    /// The file of NVRTC, a peer of the figures.
    #[arg(long, value_name = "FILE")]
    nvrtc: Option<PathBuf>,
    /// The file of libvmkernels.so, for the section capi; else what it calls is linked into this program.
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// Run one section in this process, and report on standard output.
    #[arg(long, hide = true)]
    child: Option<String>,
    /// Do one thing that may take the process with it.
    #[arg(long, hide = true)]
    probe: Option<String>,
    /// The first test to run, with --child.
    #[arg(long, hide = true, default_value_t = 0)]
    from: usize,
}

impl Arguments {
    /// Is a test of this name to run?
    fn selects(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|part| name.contains(part))
    }
}

fn main() -> ExitCode {
    let mut given = std::env::args_os().skip(1);
    if given.next().is_some_and(|first| first == driver::ASSEMBLE) {
        return vm_cuda::assemble::entry(given);
    }
    let arguments = Arguments::parse();
    if let Some(name) = &arguments.child {
        return match SECTIONS.iter().find(|section| section.name == name) {
            Some(section) => child::run(section, &arguments),
            None => ExitCode::from(2),
        };
    }
    if let Some(name) = &arguments.probe {
        return match capi::probe(name, &arguments) {
            Some(code) => code,
            None => faults::run(name, arguments.device),
        };
    }
    let unknown =
        arguments.sections.iter().find(|name| SECTIONS.iter().all(|section| section.name != **name));
    if let Some(name) = unknown {
        eprintln!("no section {name}: --list says which there are");
        return ExitCode::from(2);
    }
    let chosen = SECTIONS.iter().filter(|section| {
        arguments.sections.is_empty() || arguments.sections.iter().any(|name| name == section.name)
    });
    if arguments.list {
        for section in chosen {
            println!("{:<12} {}", section.name, section.about);
            section.selected(&arguments).iter().for_each(|test| println!("    {}", test.name));
        }
        return ExitCode::SUCCESS;
    }
    let mut table = Table::new();
    let missing = match Gpu::open(arguments.device) {
        Ok(gpu) => {
            println!("{}", gpu.describe());
            None
        }
        Err(error) => Some(format!("no CUDA driver: {error}")),
    };
    for section in chosen {
        match &missing {
            None => child::section(section, &arguments, &mut table),
            Some(reason) => {
                for test in section.selected(&arguments) {
                    table.add(Record::new(section.name, &test.name, Outcome::Skipped(reason.clone())));
                }
            }
        }
    }
    table.print_figures();
    if let Some(path) = &arguments.json
        && let Err(error) = table.write(path)
    {
        eprintln!("{}: {error}", path.display());
        return ExitCode::FAILURE;
    }
    println!("{}", table.summary());
    if table.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
