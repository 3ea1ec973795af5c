//! Kernels from the builder and from the command line, as a user runs them.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, ensure};
use vm_accel::{Accelerator, Worker, WorkerOptions, arguments};
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{GuestAddr, IRBlock, Scalar};
use vm_passthrough::accelerator::CudaJITCompiler;
use vm_passthrough::readiness::BlockerCode;
use vm_passthrough::{PassthroughManager, PciAddress};

use crate::gpu::{Gpu, TIMEOUT};
use crate::skip::skip;
use crate::{Arguments, Test};

const SOFTMAX: &str = include_str!("../../../vm-ir/filetests/run/softmax.vir");
/// Its kernel @spin never ends.
const TWO: &str = include_str!("../../../vm-service/tests/two.vir");

/// The tests of this section.
pub(crate) fn tests(_: &Arguments) -> Vec<Test> {
    vec![
        Test::new("a block of the builder is compiled, loaded, launched, read back", |gpu, _| block(gpu)),
        Test::new("launch: softmax from a .npy file agrees with the interpreter", |gpu, report| {
            let files = Files::new()?;
            files.write("softmax.vir", SOFTMAX)?;
            let run = |args: &str| files.vm_service(gpu, &format!("launch softmax.vir {args}"));
            let made = run(
                "--device interpreter --grid 1 --arg x=f32[64,999]=random:1 --arg y=f32[64,999] --out x=@x.npy",
            )?;
            ensure!(made.exit == 0, "{}", made.err);
            let command = "--device ADDR --grid 64 --arg x=@x.npy --arg y=f32[64,999] --out y=@y.npy --check";
            for trust in ["", "--trusted"] {
                let ran = run(&format!("{command} {trust}"))?;
                ensure!(ran.exit == 0 && ran.out.contains("agrees"), "{}{}", ran.out, ran.err);
                report.note(ran.out.lines().next().unwrap_or_default());
            }
            ensure!(files.dir.path().join("y.npy").exists(), "nothing was written");
            Ok(())
        }),
        Test::new("launch: a kernel that does not end is stopped", |gpu, report| {
            let files = Files::new()?;
            files.write("two.vir", TWO)?;
            for (option, expect) in [("--deadline 0.5", "500ms"), ("--fuel 100000", "100000")] {
                let ran = files.vm_service(
                    gpu,
                    &format!("launch two.vir --kernel spin --device ADDR --grid 1 --arg x=i32[1] {option}"),
                )?;
                ensure!(ran.exit == 1 && ran.err.contains("was stopped"), "{option}: {}{}", ran.out, ran.err);
                ensure!(ran.err.contains(expect), "{option}: {}", ran.err);
                report.note(ran.err.trim_end());
            }
            Ok(())
        }),
        Test::new("a GPU that is shared is not ready for a guest", |gpu, _| shared(gpu)),
    ]
}

fn block(gpu: &Gpu) -> anyhow::Result<()> {
    let accelerator = Arc::clone(&gpu.accelerator);
    let worker = Worker::start(Arc::clone(&accelerator), WorkerOptions::default())?;
    let mut compiler = CudaJITCompiler::new(accelerator);
    let block = IRBlock::new(GuestAddr(0x1000));
    compiler.compile(&block).context("an empty block")?;
    let k = block.builder();
    k.name("twice").block_size([256, 1, 1]);
    let x = k.view("x", Scalar::F32, 1, Access::ReadWrite);
    let i = k.global_id(Axis::X);
    k.if_(i.lt(x.extent(0)), || x.at([i]).store(x.at([i]).load() * 2.0));
    let kernel = worker.load(compiler.compile(&block)?.artifact())?;
    let x = worker.allocate(4 * 1000)?;
    worker.write(&x, &[1.5f32; 1000])?;
    worker.launch(&kernel, 4, &arguments![&x])?;
    let mut result = [0.0f32; 1000];
    worker.read(&x, &mut result)?;
    ensure!(result == [3.0; 1000], "{:?} …", &result[..8]);
    drop((x, kernel));
    Ok(worker.stop(TIMEOUT)?)
}

pub(crate) fn address(gpu: &Gpu) -> anyhow::Result<PciAddress> {
    let address = gpu.accelerator.info().address.clone().context("the GPU has no PCI address")?;
    Ok(address.parse()?)
}

fn shared(gpu: &Gpu) -> anyhow::Result<()> {
    let address = address(gpu)?;
    let manager = match PassthroughManager::new() {
        Ok(manager) => manager,
        Err(error) => return skip(error.to_string()),
    };
    let lease = match manager.share(address) {
        Ok(lease) => lease,
        Err(error) => return skip(error.to_string()),
    };
    let told = |manager: &PassthroughManager| -> anyhow::Result<bool> {
        let readiness = manager.explain(address)?;
        Ok(readiness.blockers.iter().any(|blocker| blocker.code == BlockerCode::InUseShared))
    };
    ensure!(told(&manager)?, "explain does not report in-use-shared");
    drop(lease);
    ensure!(manager.sharers(address)?.is_empty(), "the lease did not end");
    ensure!(!told(&manager)?, "explain reports in-use-shared after the lease ended");
    Ok(())
}

/// A folder for the files of a command line.
pub(crate) struct Files {
    dir: tempfile::TempDir,
}

pub(crate) struct Answer {
    pub(crate) exit: u8,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Files {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self { dir: tempfile::tempdir()? })
    }

    fn write(&self, name: &str, text: &str) -> anyhow::Result<()> {
        Ok(std::fs::write(self.dir.path().join(name), text)?)
    }

    /// Runs `vm-service ARGS` in this process. `ADDR` is the GPU; names of files are of the folder.
    pub(crate) fn vm_service(&self, gpu: &Gpu, args: &str) -> anyhow::Result<Answer> {
        let address = address(gpu)?.to_string();
        let file = |word: &str| match word.split_once("=@") {
            _ if Path::new(word).extension().is_some_and(|ending| ending == "vir") => {
                self.dir.path().join(word).display().to_string()
            }
            Some((name, file)) => format!("{name}=@{}", self.dir.path().join(file).display()),
            None => word.replace("ADDR", &address),
        };
        let words = std::iter::once("vm-service".to_owned()).chain(args.split_whitespace().map(file));
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let none = Path::new("/nonexistent");
        let exit = vm_service::cli::run(words.map(Into::into), None, none, &mut out, &mut err);
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(Answer { exit, out: text(out), err: text(err) })
    }
}
