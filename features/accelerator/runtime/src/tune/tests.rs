//! The tuner on a device whose kernels take as long as they are told to.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_accel::Accelerator as _;
use vm_accel::fake::{FakeAccelerator, Script};
use vm_ir::builder::BuildError;
use vm_ir::{GuestAddr, IRBlock, Kernel, Scalar, text};
use vm_jit::cache::{Cache, CacheOptions};
use vm_kernels::attention::{Forward, Gradients, Mask};
use vm_kernels::family::{Problem, Resources, Sample, Variant};
use vm_kernels::gemm::{Activation, Batch, Epilogue, Product};

use super::*;
use crate::CpuAccelerator;

/// Variants of a family: their names; one whose name begins with `loop` is guarded, one with a `+` has the kernels on both sides of
/// it, and the launch of `astray` takes an argument that is not there.
#[derive(Clone, Debug)]
struct Named(&'static [&'static str]);

#[derive(Clone, Debug, PartialEq, Eq)]
struct One(&'static str);

impl Variant for One {
    fn name(&self) -> String {
        self.0.to_owned()
    }

    fn kernel(&self, _: GuestAddr) -> Result<Kernel, BuildError> {
        let name = self.0.split('+').next().unwrap_or_default();
        if name == "large" {
            let block = IRBlock::new(GuestAddr(0x77));
            block.builder().name(name).shared("tile", Scalar::F32, &[20_000]);
            return block.kernel();
        }
        let body = match name.starts_with("loop") {
            false => "%zero = const 0 : i64\n store @x[%zero, %zero], %by\n",
            true => {
                "%zero = const 0 : i64\n while {\n %a = load @x[%zero, %zero] : f32\n %on = ne %a, %by : bool\n yield %on\n } do \
                 {\n store @x[%zero, %zero], %by\n }\n"
            }
        };
        let source = format!(
            "vir 1\nkernel @{name}(@x: view<f32, [?, ?], readwrite>, %by: f32) at 0x1000 block(32) {{\n {body}}}\n"
        );
        let module = text::parse(&source).unwrap_or_else(|error| panic!("{error}\n{source}"));
        Ok(module.kernels()[0].clone())
    }

    fn kernels(&self, guest: GuestAddr) -> Result<Vec<Kernel>, BuildError> {
        self.0.split('+').map(|name| One(name).kernel(guest)).collect()
    }
}

impl Problem for Named {
    type Variant = One;

    fn family(&self) -> &str {
        "named"
    }

    fn class(&self) -> String {
        "any".into()
    }

    fn variants(&self, _: &Resources) -> Vec<One> {
        self.0.iter().copied().map(One).collect()
    }

    fn grid(&self, _: &One, resources: &Resources) -> [u32; 3] {
        [resources.compute_units, 1, 1]
    }

    fn steps(&self, variant: &One, resources: &Resources) -> Vec<Step> {
        let last = if variant.0 == "astray" { 2 } else { 1 };
        let step = |number| Step { grid: [resources.compute_units, 1, 1 + number], arguments: vec![0, last] };
        (0..variant.0.split('+').count() as u32).map(step).collect()
    }

    fn arguments(&self) -> Vec<Sample> {
        vec![Sample::Random { element: Scalar::F32, extents: vec![33, 1001] }, Sample::f32(2.0)]
    }

    fn operations(&self) -> f64 {
        1.0
    }
}

fn takes(micros: u64) -> Script {
    Script::Takes(Duration::from_micros(micros))
}

fn device(scripts: &[(&str, Script)]) -> Arc<FakeAccelerator> {
    let device = Arc::new(FakeAccelerator::new());
    scripts.iter().for_each(|(name, script)| device.script(&format!("vir_{name}"), *script));
    device
}

fn on_disk(folder: &Path) -> Arc<Cache> {
    let options =
        CacheOptions { folder: Some(folder.to_owned()), disk_bytes: 1 << 20, ..CacheOptions::default() };
    Arc::new(Cache::open(&options).unwrap())
}

fn tuner(device: &Arc<FakeAccelerator>) -> Tuner<FakeAccelerator> {
    Tuner::new(JitCompiler::new(Arc::clone(device)))
}

/// Long enough for a machine that is busy.
fn patient() -> TuneOptions {
    TuneOptions { limit: Duration::from_secs(60), ..TuneOptions::default() }
}

/// What is chosen among scripted variants, and what came of each: `=` measured to the end, `-` slower, `!` failed.
#[track_caller]
fn check(names: &'static [&'static str], scripts: &[(&str, Script)], wanted: &str) {
    let tuned = tuner(&device(scripts)).tune(&Named(names), &patient());
    let found = match tuned {
        Ok(tuned) => {
            assert_eq!((tuned.variant.0, tuned.cached), (&*tuned.name, false));
            let marks: String = tuned.candidates.iter().map(|candidate| mark(&candidate.outcome)).collect();
            format!("{} {marks}", tuned.name)
        }
        Err(error) => error.to_string(),
    };
    assert!(found.starts_with(wanted), "{found}\nnot\n{wanted}");
}

fn mark(outcome: &Outcome) -> char {
    match outcome {
        Outcome::Measured(_) => '=',
        Outcome::Slower(_) => '-',
        Outcome::Failed(_) => '!',
        Outcome::Late => '?',
    }
}

#[test]
fn the_fastest_is_chosen() {
    check(&["a"], &[("a", takes(100))], "a =");
    check(&["a", "b", "c"], &[("a", takes(300)), ("b", takes(100)), ("c", takes(107))], "b -==");
    check(&["a", "b", "c"], &[("a", takes(400)), ("b", takes(2000)), ("c", takes(300))], "c --=");
    // Of two that take as long, the first in the table.
    check(&["a", "b"], &[("a", takes(2001)), ("b", takes(2000))], "a ==");
    // A long one is launched once for a sample, a short one several times in a graph.
    check(&["a", "b"], &[("a", takes(3)), ("b", takes(5000))], "a =-");
}

#[test]
fn kernels_that_belong_together_are_measured_as_a_sequence() {
    let scripts = [("a", takes(100)), ("b", takes(100)), ("c", takes(150)), ("d", takes(250))];
    check(&["a+b", "c"], &scripts, "c -=");
    check(&["d", "a+b"], &scripts, "a+b -=");
    check(&["a+b", "a+c", "b+a"], &scripts, "a+b =-=");
    // One without code is enough to leave them out, and one that faults to end it.
    check(&["a+x", "large+a", "a+large", "c"], &scripts, "c !!!=");
    check(
        &["x+a"],
        &scripts,
        "no variant of family named, class any, could be measured on simulated accelerator; x+a: ",
    );
    let faults = [("a", takes(100)), ("b", Script::Faults)];
    check(&["a+b"], &faults, "variant a+b of family named, class any, faulted");
    let tuner = tuner(&device(&scripts));
    for cached in [false, true] {
        let tuned = tuner.tune(&Named(&["a+b", "d"]), &patient()).unwrap();
        let grids: Vec<_> = tuned.steps.iter().map(|step| step.grid[2]).collect();
        assert_eq!((tuned.name.as_str(), tuned.cached, grids), ("a+b", cached, vec![1, 2]));
    }
}

#[test]
fn what_is_wrong_is_named() {
    // No code for it, which the fake device says of all that it has no script for.
    check(&["a", "b"], &[("b", takes(100))], "b !=");
    check(
        &["a"],
        &[],
        "no variant of family named, class any, could be measured on simulated accelerator; a: kernel vir_a can't be",
    );
    check(
        &["a", "b", "c"],
        &[("a", takes(100)), ("b", Script::Faults), ("c", takes(50))],
        "variant b of family named, class any, faulted: the device's context is lost (illegal address)",
    );
    check(&[], &[], "family named has no variant of class any that simulated accelerator has room for");
    // No code for what the target does not have.
    check(&["large", "b"], &[("b", takes(100))], "b !=");
    let why = "no variant of family named, class any, could be measured on simulated accelerator; large: kernel @large (guest 0x77): \
               the shared arrays take 80000 bytes";
    check(&["large"], &[], why);
    check(
        &["a", "astray"],
        &[("a", takes(100))],
        "variant astray of family named can't be launched: launch 0 takes argument 2, and there are 2, from 0 on",
    );
    let huge = Product::of(1 << 40, 1 << 40, 1 << 40);
    assert!(tuner(&device(&[])).tune(&huge, &patient()).is_err());
}

#[test]
fn it_ends_in_time() {
    let limit = Duration::from_millis(1500);
    let options = TuneOptions { limit, ..TuneOptions::default() };
    let check =
        |names: &'static [&'static str], device: &Arc<FakeAccelerator>, wanted: Result<&str, &str>| {
            let start = Instant::now();
            let tuned = tuner(device).tune(&Named(names), &options);
            assert!(start.elapsed() < limit + Duration::from_secs(120), "{:?}", start.elapsed());
            match (tuned, wanted) {
                (Ok(tuned), Ok(wanted)) => assert_eq!(tuned.name, wanted),
                (Err(error), Err(wanted)) => assert!(error.to_string().contains(wanted), "{error}"),
                (tuned, wanted) => panic!("{tuned:?}, not {wanted:?}"),
            }
        };
    let hanging = device(&[("a", takes(20)), ("b", Script::Hangs), ("loop", Script::Hangs)]);
    check(&["a", "b"], &hanging, Err("was not tuned within 1.5s: it did not end warming up b"));
    // What is guarded is cancelled, and another chosen.
    check(&["loop", "a"], &hanging, Ok("a"));
    let paused = device(&[("a", takes(20))]);
    paused.pause();
    check(&["a"], &paused, Err("was not tuned within"));
    paused.resume();
    // No time at all.
    let none = TuneOptions { limit: Duration::ZERO, ..TuneOptions::default() };
    let late = tuner(&paused).tune(&Named(&["a"]), &none);
    assert!(matches!(late, Err(TuneError::TimedOut { .. })), "{late:?}");
}

#[test]
fn it_reports_and_is_cancelled() {
    let device = device(&[("a", takes(100)), ("b", takes(20))]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let theirs = Arc::clone(&seen);
    let progress: Arc<TuneProgress> =
        Arc::new(move |event: &TuneEvent| theirs.lock().unwrap().push(event.clone()));
    let options = TuneOptions { progress: Some(progress), ..patient() };
    tuner(&device).tune(&Named(&["a", "b"]), &options).unwrap();
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    let compiled = seen.iter().filter(|event| matches!(event, TuneEvent::Compiled { rejected: None, .. }));
    assert_eq!(compiled.count(), 2);
    let last = seen.last().unwrap();
    assert!(matches!(last, TuneEvent::Round { left: 1, best, .. } if best == "b"), "{last:?}");

    let cancel = Cancel::default();
    let theirs = cancel.clone();
    let progress: Arc<TuneProgress> = Arc::new(move |event: &TuneEvent| {
        if matches!(event, TuneEvent::Round { number: 1, .. }) {
            theirs.cancel();
        }
    });
    let options = TuneOptions { progress: Some(progress), cancel, ..patient() };
    let tuner = tuner(&device);
    let cancelled = tuner.tune(&Named(&["a", "b"]), &options);
    assert!(matches!(cancelled, Err(TuneError::Cancelled)), "{cancelled:?}");
    assert_eq!(tuner.kept(&Named(&["a", "b"])).unwrap(), None);
}

#[test]
fn a_choice_is_kept() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let family = Named(&["a", "b", "c"]);
    let scripts = [("a", takes(300)), ("b", takes(100))];
    let first = tuner(&device(&scripts)).choices(on_disk(folder.path())).tune(&family, &patient()).unwrap();
    assert_eq!((&*first.name, first.cached), ("b", false));
    // On a device that has none of the kernels: nothing is measured.
    let dead = device(&[]);
    let kept = |folder: &Path, names| tuner(&dead).choices(on_disk(folder)).tune(&Named(names), &patient());
    let second = kept(folder.path(), family.0).unwrap();
    assert!(second.cached);
    assert_eq!((&second.name, &second.candidates, second.grid), (&first.name, &first.candidates, first.grid));
    // Another machine's folder is merged by copying its files.
    for file in fs::read_dir(folder.path()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), other.path().join(file.file_name())).unwrap();
    }
    assert_eq!(kept(other.path(), family.0).unwrap().name, "b");
    // With another variant in the table, another trust, or on request, it is measured again.
    assert!(kept(folder.path(), &["a", "b", "c", "d"]).is_err());
    let again = TuneOptions { again: true, ..patient() };
    let turned = device(&[("a", takes(100)), ("b", takes(300))]);
    let third = tuner(&turned).choices(on_disk(folder.path())).tune(&family, &again).unwrap();
    assert_eq!((&*third.name, third.cached), ("a", false));
    assert_eq!(kept(folder.path(), family.0).unwrap().name, "a");
    // One that faulted is not kept.
    let faulty = tempfile::tempdir().unwrap();
    let device = device(&[("a", takes(100)), ("b", Script::Faults)]);
    let tuner = tuner(&device).choices(on_disk(faulty.path()));
    assert!(tuner.tune(&Named(&["a", "b"]), &patient()).is_err());
    assert_eq!(tuner.kept(&Named(&["a", "b"])).unwrap(), None);
}

/// The files of choices in a folder.
fn entries(folder: &Path) -> Vec<std::path::PathBuf> {
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "entry")).collect()
}

#[test]
fn hostile_choices_are_ignored() {
    let family = Named(&["a", "b"]);
    let (fast, slow) =
        (device(&[("a", takes(300)), ("b", takes(100))]), device(&[("a", takes(100)), ("b", takes(300))]));
    let folder = tempfile::tempdir().unwrap();
    let tune =
        |device, folder: &Path| tuner(device).choices(on_disk(folder)).tune(&family, &patient()).unwrap();
    tune(&fast, folder.path());
    let [file] = &entries(folder.path())[..] else { panic!("{:?}", entries(folder.path())) };
    let good = fs::read(file).unwrap();
    let mut turned = good.clone();
    *turned.last_mut().unwrap() ^= 1;
    let huge = vec![0; 2 << 20];
    for bad in [&[][..], &good[..good.len() - 1], &turned, &huge, b"vm-jit cache 1\n"] {
        fs::write(file, bad).unwrap();
        let tuned = tune(&slow, folder.path());
        assert_eq!((&*tuned.name, tuned.cached), ("a", false), "{} bytes", bad.len());
        assert!(tune(&fast, folder.path()).cached);
    }
    // What has the right key and checksum, and says something else.
    let subject = tuner(&fast).subject(&family).unwrap();
    let names: Vec<String> = family.0.iter().map(|name| (*name).to_owned()).collect();
    let figure = Figure {
        median: Duration::from_nanos(1),
        least: Duration::ZERO,
        greatest: Duration::MAX,
        samples: 0,
    };
    let candidates = |names: &[&str]| -> Vec<Candidate> {
        let candidate =
            |name: &&str| Candidate { name: (*name).to_owned(), outcome: Outcome::Measured(figure) };
        names.iter().map(candidate).collect()
    };
    let other = choice::Subject { device: "another".into(), ..subject.clone() };
    let long = "x".repeat(100_000);
    for (subject_of, candidates, chosen) in [
        (&subject, candidates(&["a", "b"]), 2),
        (&subject, candidates(&["a", "b"]), usize::MAX),
        (&subject, candidates(&["a"]), 0),
        (&subject, candidates(&["a", "x"]), 1),
        (&subject, candidates(&["a", "b", "c"]), 2),
        (
            &subject,
            vec![Candidate { name: "a".into(), outcome: Outcome::Late }, candidates(&["b"])[0].clone()],
            0,
        ),
        (&other, candidates(&["a", "b"]), 1),
        (&subject, candidates(&[&long, "b"]), 1),
    ] {
        let cache = on_disk(folder.path());
        // Under the key that is asked for, whatever it says.
        let scratch = Cache::in_memory();
        choice::keep(&scratch, subject_of, &names, &candidates, chosen);
        let bytes = scratch.get(&choice::key(subject_of, &names)).unwrap_or_else(|| vec![0xff; 100].into());
        cache.put(&choice::key(&subject, &names), bytes);
        assert!(choice::read(&cache, &subject, &names).is_none(), "{candidates:?}, {chosen}");
        // It is gone, and what is measured takes its place.
        assert!(!tune(&slow, folder.path()).cached);
    }
    // A file that others may write to is not believed.
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(file, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(!tune(&slow, folder.path()).cached);
}

const FOLDER: &str = "VM_RUNTIME_TUNE_FOLDER";

/// What each of several processes does; nothing by itself.
#[test]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let device = device(&[("a", takes(300)), ("b", takes(100))]);
    for again in [false, true, true, false] {
        let tuner = tuner(&device).choices(on_disk(Path::new(&folder)));
        let tuned = tuner.tune(&Named(&["a", "b"]), &TuneOptions { again, ..patient() }).unwrap();
        assert_eq!(tuned.name, "b");
    }
}

#[test]
fn many_processes_share_choices() {
    let folder = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let start = || {
        let mut command = Command::new(&program);
        command.args(["--exact", "tune::tests::child"]).env(FOLDER, folder.path());
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..3).map(|_| start()).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }
    let found =
        tuner(&device(&[])).choices(on_disk(folder.path())).kept(&Named(&["a", "b"])).unwrap().unwrap();
    assert_eq!(found.name, "b");
    assert_eq!(entries(folder.path()).len(), 1);
}

#[test]
fn on_the_cpu() {
    let tuner = Tuner::new(JitCompiler::new(Arc::new(CpuAccelerator::new().unwrap())));
    let tuned = tuner.tune(&Named(&["a", "loop"]), &patient()).unwrap();
    let figures: Vec<_> =
        tuned.candidates.iter().filter_map(|candidate| candidate.outcome.figure()).collect();
    assert!(figures.len() == 2 && figures.iter().all(|figure| figure.samples > 0), "{tuned:?}");
    assert!(tuner.tune(&Named(&["a", "loop"]), &patient()).unwrap().cached);
}

/// Problems of every family that tile kernels have, so small that a processor takes no time for them: each choice is launched with its arguments.
#[test]
fn families_on_the_cpu() {
    fn check<P: Problem>(tuner: &Tuner<CpuAccelerator>, problem: &P) {
        let tuned = tuner.tune(problem, &patient());
        let tuned = tuned.unwrap_or_else(|error| panic!("{}: {error}", problem.class()));
        for Candidate { name, outcome } in &tuned.candidates {
            assert!(outcome.figure().is_some(), "{name}: {outcome:?}");
        }
        assert_eq!(tuned.steps.len(), tuned.variant.kernels(GuestAddr(0)).unwrap().len(), "{}", tuned.name);
    }
    let tuner = Tuner::new(JitCompiler::new(Arc::new(CpuAccelerator::new().unwrap())));
    let (bf16, f32) = (Scalar::Bf16, Scalar::F32);
    for (mask, packed, element) in [
        (Mask::Causal, false, bf16),
        (Mask::Window, false, f32),
        (Mask::Full, true, f32),
        (Mask::Window, true, bf16),
    ] {
        let (window, heads) = ([9, 2], [2, 1]);
        let of = Gradients::of(2, 2, 70, 64, false);
        check(&tuner, &Gradients { mask, packed, element, window, heads, ..of });
        let of = Forward::of(2, 2, 70, 64, false);
        check(&tuner, &Forward { mask, packed, element, window, heads, log_sums: packed, ..of });
    }
    let epilogue = Epilogue { scaled: true, bias: true, activation: Activation::Relu, ..Epilogue::NONE };
    check(&tuner, &Product { epilogue, ..Product::of(70, 40, 50) });
    check(&tuner, &Product { batch: Batch::Grouped, matrices: 3, ..Product::of(70, 40, 50) });
}

#[test]
fn kernels_are_chosen_by_what_compiles_for_the_device() {
    let check = |target: &str, kind: Kind, cluster: u32| {
        let info = DeviceInfo { target: target.into(), ..FakeAccelerator::new().info().clone() };
        let found = resources(&info);
        assert_eq!((found.kind, found.cluster), (kind, cluster), "{target}");
    };
    check("cpu", Kind::Cpu, 1);
    check("sm_80", Kind::Gpu, 1);
    check("sm_90", Kind::Gpu, 8);
    check("gfx942", Kind::Gpu, 1);
    // Those of a guest's host.
    check("cpu:x86-64-v3", Kind::Cpu, 1);
    check("ptx:sm_86", Kind::Gpu, 1);
    check("ptx:sm_90a", Kind::Gpu, 8);
    check("amdgcn:gfx942", Kind::Gpu, 1);
}
