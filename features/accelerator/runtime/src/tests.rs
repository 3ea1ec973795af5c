//! The join of compiler and accelerator, with a fake device that is compiled for as if it were a T4.

use std::sync::Arc;
use std::sync::Mutex;

use vm_accel::fake::FakeAccelerator;
use vm_accel::{Extent, Guard, Parameter, ParameterKind};
use vm_ir::op::Axis;
use vm_ir::view::Access;
use vm_ir::{
    GuestAddr, IRBlock, Kernel, Module, Scalar as Element, Trust, Type, ValidModule, text, validate,
};
use vm_jit::Target;

use super::*;

impl JitTarget for FakeAccelerator {
    fn target(&self) -> Result<Target, CompileError> {
        Ok("ptx:sm_75".parse().expect("a target"))
    }
}

fn compiler() -> JitCompiler<FakeAccelerator> {
    JitCompiler::new(Arc::new(FakeAccelerator::new()))
}

fn scale() -> IRBlock {
    let block = IRBlock::new(GuestAddr(0x1000));
    let k = block.builder();
    k.name("scale").block_size([128, 2, 1]);
    let x = k.view("x", Element::F32, 2, Access::ReadWrite);
    let by = k.scalar_in("by", Type::I32, 1, 9);
    let (i, j) = (k.global_id(Axis::Y), k.global_id(Axis::X));
    k.if_(i.lt(x.extent(0)), || {
        k.if_(j.lt(x.extent(1)), || x.at([i, j]).store(x.at([i, j]).load() * by.to(Element::F32)));
    });
    block
}

/// A kernel that the source tells of, as a guest's.
fn module(source: &str) -> Module {
    text::parse(source).expect("a module")
}

const LOOPS: &str = "vir 1
kernel @loops(@x: view<i64, [?*4, 16], readwrite, align 32>) at 0x2000 block(32) {
  %zero = const 0 : i64
  while {
    %a = load @x[%zero, %zero] : i64
    %on = eq %a, %zero : bool
    yield %on
  } do {
    store @x[%zero, %zero], %zero
  }
}
kernel @nothing() at 0x3000 block(1) {
}
kernel @product(%by: f32, @a: view<f32, [m, k*4], read>, @b: view<f32, [k*4, m], read>) at 0x4000 block(1) {
}
";

#[test]
fn the_artifact_says_what_the_kernel_says() {
    let kernel = compiler().compile(&scale()).unwrap();
    assert_eq!((kernel.name(), kernel.format(), kernel.trust()), ("scale", "PTX", Trust::Guest));
    assert_eq!(kernel.target().to_string(), "ptx:sm_75");
    assert!(str::from_utf8(kernel.artifact().image()).unwrap().contains(".entry vir_scale("));
    let signature = kernel.artifact().signature();
    assert_eq!(
        (signature.entry.as_str(), signature.block, signature.guarded),
        ("vir_scale", [128, 2, 1], false)
    );
    let view = ParameterKind::View {
        extents: vec![Extent::Any; 2],
        element: vm_accel::Element::F32,
        align: 4,
        writes: true,
    };
    let by = ParameterKind::Scalar { bytes: 4, range: Some((1, 9)) };
    let named = |name: &str, kind| Parameter { name: name.into(), kind };
    assert_eq!(signature.parameters, [named("x", view), named("by", by)]);

    let kernels = compiler().compile_module(&validate(module(LOOPS), Trust::Guest).unwrap()).unwrap();
    assert_eq!(kernels.iter().map(CompiledKernel::name).collect::<Vec<_>>(), ["loops", "nothing", "product"]);
    assert_eq!(kernels[0].artifact().image(), kernels[1].artifact().image());
    let signature = kernels[0].artifact().signature();
    let view = ParameterKind::View {
        extents: vec![Extent::Multiple(4), Extent::Fixed(16)],
        element: vm_accel::Element::U64,
        align: 32,
        writes: true,
    };
    assert_eq!(signature.parameters, [named("x", view)]);
    assert_eq!(kernels[0].artifact().params().guard, Some(Guard { stop: 32, fuel: 40 }));
    assert_eq!(kernels[1].artifact().parameter_bytes(), 0);
    let view =
        |extents| ParameterKind::View { extents, element: vm_accel::Element::F32, align: 4, writes: false };
    let same = |dimension| Extent::Same { parameter: 1, dimension };
    let by = ParameterKind::Scalar { bytes: 4, range: None };
    assert_eq!(
        kernels[2].artifact().signature().parameters,
        [
            named("by", by),
            named("a", view(vec![Extent::Any, Extent::Multiple(4)])),
            named("b", view(vec![same(1), same(0)]))
        ]
    );
}

/// Compiles the kernel that scales, and runs it on a device that is there.
fn runs<A: JitTarget>(accelerator: A) {
    runs_by(JitCompiler::new(Arc::new(accelerator)));
}

fn runs_by<A: JitTarget>(mut compiler: JitCompiler<A>) {
    let accelerator = Arc::clone(compiler.accelerator());
    let worker: Worker<A> = Worker::start(accelerator, WorkerOptions::default()).unwrap();
    let kernel = compiler.compile(&scale()).unwrap();
    let kernel = worker.load(kernel.artifact()).unwrap();
    let kernels = compiler.compile_module(&validate(module(LOOPS), Trust::Guest).unwrap()).unwrap();
    let product = worker.load(kernels[2].artifact()).unwrap();
    let x = worker.allocate(4 * 3 * 100).unwrap();
    let given: Vec<f32> = (0..300u16).map(f32::from).collect();
    worker.write(&x, &given).unwrap();
    let refused = worker.launch(&kernel, [1, 2], &arguments![x.shaped(&[3, 100]).unwrap(), 10i32]);
    assert!(matches!(refused, Err(Error::Arguments { .. })), "{refused:?}");
    worker.launch(&kernel, [1, 2], &arguments![x.shaped(&[3, 100]).unwrap(), 3i32]).unwrap();
    let mut result = [0.0f32; 300];
    worker.read(&x, &mut result).unwrap();
    let expect: Vec<f32> = given.iter().map(|x| x * 3.0).collect();
    assert_eq!(result[..], expect);
    // Extents of one name are equal in every launch.
    let shaped = |extents: &[u64]| x.shaped(extents).unwrap();
    worker.launch(&product, 1, &arguments![1.0f32, shaped(&[3, 8]), shaped(&[8, 3])]).unwrap();
    let refused = worker.launch(&product, 1, &arguments![1.0f32, shaped(&[3, 8]), shaped(&[3, 8])]);
    assert!(matches!(&refused, Err(Error::Arguments { parameter, .. }) if parameter == "b"), "{refused:?}");
    drop((x, kernel, product));
    worker.stop(std::time::Duration::from_secs(10)).unwrap();
}

#[test]
fn on_the_cpu() {
    runs(CpuAccelerator::new().unwrap());
}

/// Makes code objects that the fake HIP runs: of LLVM IR whose kernels are those of one of these modules, by LLVM where it is there.
#[derive(Debug)]
struct FakeAssembler {
    modules: Vec<Arc<ValidModule>>,
    llvm: Option<RocmAssembler>,
}

impl Assemble for FakeAssembler {
    fn product(&self) -> String {
        "code object".into()
    }

    fn identity(&self) -> String {
        "fake".into()
    }

    fn assemble(&self, code: &[u8], target: &Target) -> Result<Vec<u8>, AssembleError> {
        let Target::Amdgcn(options) = target else { return Err(format!("{target} is no AMD GPU").into()) };
        for module in &self.modules {
            let gpu = vm_jit::compile(module, target)?;
            if gpu.code != code {
                continue;
            }
            let cpu = vm_jit::compile(module, &"cpu".parse()?)?;
            let image = Arc::from(cpu.code.as_slice());
            let kernels = gpu.entries.iter().zip(&cpu.entries).map(|(gpu, cpu)| {
                let cpu = artifact::of(module, cpu, vm_jit::Format::Elf, &image)?;
                Ok(rocm::fake::Kernel { symbol: gpu.symbol.clone(), params: gpu.params.clone(), cpu })
            });
            let (chip, kernels) = (options.chip.name(), kernels.collect::<Result<_, Error>>()?);
            let Some(llvm) = &self.llvm else { return Ok(rocm::fake::code_object(chip, kernels)) };
            let object = llvm.assemble(code, target)?;
            rocm::fake::know(&object, chip, kernels);
            return Ok(object);
        }
        Err("it is of another module".into())
    }
}

#[test]
fn on_an_amd_gpu_of_a_fake() {
    let check = |chip: &str, wavefront, llvm: &Option<RocmAssembler>| {
        let fake = rocm::fake::Fake::new(rocm::fake::FakeOptions {
            architecture: chip.into(),
            wavefront,
            ..Default::default()
        });
        let own = scale().kernel().unwrap().into();
        let modules = [own, module(LOOPS)].map(|module| Arc::new(validate(module, Trust::Guest).unwrap()));
        let assembler: Arc<dyn Assemble> =
            Arc::new(FakeAssembler { modules: modules.into(), llvm: llvm.clone() });
        runs_by(RocmJITCompiler::new(Arc::new(fake.accelerator())).assembler(Some(assembler)));
        assert_eq!((fake.faults(), fake.left()), (vec![], vec![]));
    };
    check("gfx90a", 64, &None);
    check("gfx1201", 32, &None);
    let llvm = rocm::assemble::Assembler::find().map(RocmAssembler);
    match &llvm {
        Ok(_) => println!("with code objects of LLVM's"),
        Err(error) => println!("without: {error}"),
    }
    let llvm = llvm.ok();
    check("gfx942", 64, &llvm);
    check("gfx1100", 32, &llvm);
    let other = rocm::fake::FakeOptions { architecture: "gfx803".into(), ..Default::default() };
    let refused =
        RocmJITCompiler::new(Arc::new(rocm::fake::Fake::new(other).accelerator())).compile(&scale());
    assert!(refused.unwrap_err().to_string().contains("no chip `gfx803`; there are gfx90a, gfx942"));
}

#[test]
fn on_an_nvidia_gpu() {
    match CudaAccelerator::new(0) {
        Ok(gpu) => runs(gpu),
        Err(error) => println!("skipped: {error}"),
    }
}

#[test]
fn an_empty_block_compiles() {
    let kernel = compiler().compile(&IRBlock::new(GuestAddr(0x1000))).unwrap();
    assert_eq!(kernel.name(), "kernel");
}

/// Counts what it is asked for, and fails on request.
#[derive(Debug, Default)]
struct Counting {
    name: &'static str,
    asked: Mutex<u32>,
    prepared: Mutex<Vec<String>>,
    fails: bool,
}

impl Assemble for Counting {
    fn product(&self) -> String {
        "counted".into()
    }

    fn identity(&self) -> String {
        self.name.into()
    }

    fn prepare(&self, target: &Target) {
        self.prepared.lock().unwrap().push(target.to_string());
    }

    fn assemble(&self, code: &[u8], target: &Target) -> Result<Vec<u8>, AssembleError> {
        *self.asked.lock().unwrap() += 1;
        if self.fails {
            Err("it is Monday".into())
        } else {
            Ok([target.to_string().as_bytes(), code].concat())
        }
    }
}

#[test]
fn what_was_compiled_and_assembled_is_remembered() {
    let counting = Arc::new(Counting::default());
    let mut compiler = compiler().assembler(Some(counting.clone()));
    compiler.prepare().unwrap();
    assert_eq!(*counting.prepared.lock().unwrap(), ["ptx:sm_75"]);
    let first = compiler.compile(&scale()).unwrap();
    // A clone has the same cache.
    let second = compiler.clone().compile(&scale()).unwrap();
    assert_eq!(first, second);
    assert_eq!(first.format(), "counted");
    assert!(first.artifact().image().starts_with(b"ptx:sm_75.version"), "{:?}", first.artifact().image());
    assert_eq!(*counting.asked.lock().unwrap(), 1);
    assert_eq!((compiler.statistics().misses, compiler.statistics().memory_hits), (2, 2));
    // What another assembler made is not its own.
    let other = Arc::new(Counting { name: "another", ..Counting::default() });
    compiler.assembler(Some(other.clone())).compile(&scale()).unwrap();
    assert_eq!(*other.asked.lock().unwrap(), 1);
}

#[test]
fn every_error_says_which_kernel() {
    let check = |result: Result<CompiledKernel, CompileError>, expect: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    let block = IRBlock::new(GuestAddr(0x77));
    block.builder().name("not a name");
    check(compiler().compile(&block), "kernel @kernel at 0x77");
    let block = IRBlock::new(GuestAddr(0x77));
    block.builder().name("wide").block_size([4096, 1, 1]);
    check(compiler().compile(&block), "kernel @wide at 0x77");
    let block = IRBlock::new(GuestAddr(0x77));
    block.builder().name("large").shared("tile", Element::F32, &[20_000]);
    check(compiler().compile(&block), "kernel @large (guest 0x77): the shared arrays take 80000 bytes");
    let failing = compiler().assembler(Some(Arc::new(Counting { fails: true, ..Counting::default() })));
    check(
        failing.clone().compile(&scale()),
        "kernel @scale was compiled for ptx:sm_75, but not assembled: it is Monday",
    );
    // Also where all that an error came of is printed behind it.
    let error = failing.clone().compile(&scale()).unwrap_err();
    let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
    let all = chain.map(ToString::to_string).collect::<Vec<_>>().join(": ");
    assert_eq!(all.matches("it is Monday").count(), 1, "{all}");
}

#[test]
#[allow(unsafe_code)]
fn the_hosts_own_is_compiled_only_by_who_vouches_for_it() {
    let own = validate(module(LOOPS), Trust::Trusted).unwrap();
    let error = compiler().compile_module(&own).unwrap_err().to_string();
    assert!(error.contains("kernel @loops was validated as the host's own"), "{error}");
    // SAFETY: nothing is launched.
    let trusted = unsafe { compiler().trusted() };
    let kernels = trusted.compile_module(&own).unwrap();
    assert_eq!((kernels[0].trust(), kernels[0].artifact().signature().guarded), (Trust::Trusted, false));
    // It takes a guest's as well, and leaves the checks in.
    let guests = trusted.compile_module(&validate(module(LOOPS), Trust::Guest).unwrap()).unwrap();
    assert!(guests[0].artifact().signature().guarded);
}

/// A device whose host compiles, for another target.
struct Elsewhere(FakeAccelerator, &'static str);

impl Accelerator for Elsewhere {
    type Queue = <FakeAccelerator as Accelerator>::Queue;

    fn info(&self) -> &DeviceInfo {
        self.0.info()
    }

    fn open(&self, options: &QueueOptions) -> Result<Self::Queue, Error> {
        self.0.open(options)
    }
}

impl JitTarget for Elsewhere {
    fn target(&self) -> Result<Target, CompileError> {
        Ok(Target::Ir)
    }

    fn host_target(&self) -> Option<Target> {
        self.1.parse().ok()
    }
}

#[test]
fn what_the_host_would_reject_is_rejected_before_it_is_sent() {
    let compile = |host, kernel: Kernel| {
        JitCompiler::new(Arc::new(Elsewhere(FakeAccelerator::new(), host))).compile_kernel(kernel)
    };
    let block = IRBlock::new(GuestAddr(0x77));
    block.builder().name("large").shared("tile", Element::F32, &[20_000]);
    let rejected = compile("ptx:sm_75", block.kernel().unwrap());
    assert!(matches!(&rejected, Err(CompileError::Rejected(_))), "{rejected:?}");
    for host in ["ptx:sm_90a", "a target of a newer host"] {
        let kernel = compile(host, block.kernel().unwrap()).unwrap();
        assert_eq!((kernel.format(), kernel.target()), ("IR", &Target::Ir), "{host}");
    }
    let loops = compile("ptx:sm_75", module(LOOPS).kernels()[0].clone()).unwrap();
    assert!(!loops.artifact().signature().guarded, "the host adds the guard");
}
