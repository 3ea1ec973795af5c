//! Batches on an AMD GPU of a fake HIP, compiled by LLVM in the assembler's process, which is a thread here.

use vm_passthrough::accelerator::rocm::Roots;
use vm_passthrough::accelerator::rocm::fake::Fake;
use vm_passthrough::accelerator::{JitCompiler, JitTarget as _, RocmAccelerator};

use super::*;
use crate::accelerators::assembler;

#[path = "../../../../tests/shared/rocm.rs"]
mod shared;

const CHIP: &str = "gfx942";
const KERNELS: &str = "
    kernel @scale(@x: view<f32, [?], readwrite>, %by: f32) at 0x1 block(64) {
      %i = global_id.x : i64
      %v = load @x[%i] : f32
      %w = mul %v, %by : f32
      store @x[%i], %w
    }
    kernel @spin(@x: view<i32, [1], readwrite>) at 0x2 block(1) {
      %i = const 0 : i64
      %zero = const 0 : i32
      while {
        %a = load @x[%i] : i32
        %on = eq %a, %zero : bool
        yield %on
      } do {
        store @x[%i], %zero
      }
    }";

/// A GPU at an address that no other test has, where its driver would list it.
fn gpu(address: &str) -> Result<(Fake, Roots, tempfile::TempDir), String> {
    let root = tempfile::tempdir().unwrap();
    let roots = Roots { sys: root.path().join("sys"), dev: root.path().join("dev") };
    let fake = shared::gpu(&roots.sys, CHIP, address)?;
    shared::know(CHIP, &format!("vir 1\n{KERNELS}"));
    shared::know(CHIP, backend::WARM_UP);
    Ok((fake, roots, root))
}

#[test]
fn a_guests_kernels_run_within_its_quotas_and_its_time() {
    let (fake, roots, _root) = match gpu("0000:65:00.0") {
        Ok(gpu) => gpu,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let device = Arc::new(RocmAccelerator::at(&roots, "0000:65:00.0").unwrap());
    let target = device.target().unwrap().to_string();
    let compiler = JitCompiler::new(device.clone()).assembler(Some(Arc::new(assembler::here().unwrap())));
    let mut bench = Bench::on(device, Compiler::Kernels(Arc::new(backend::Jit { compiler, target })));
    let numbers: Vec<u8> = (0..1024u16).flat_map(|number| f32::from(number).to_le_bytes()).collect();
    bench.ram.write_all_at(&numbers, 0x2000).unwrap();
    let ir = module(KERNELS);
    let half = |batch: &mut BatchWriter<'_>, buffer, numbers| {
        batch.launch(
            1,
            0,
            [numbers as u32 / 64, 1, 1],
            &[Argument::view(buffer, 0, &[numbers])?, Argument::f32(0.5)],
        )
    };
    // In place, in the guest's own memory; and in the device's.
    bench.check(
        |batch| {
            batch.create_module(1, &ir)?;
            batch.import_buffer(1, &[page(3)])?;
            batch.create_buffer(2, 4096)?;
            batch.copy((2, 0), (1, 0), 4096)?;
            half(batch, 1, 1024)?;
            half(batch, 2, 1024)?;
            half(batch, 2, 1024)?;
            batch.fence()
        },
        Ok(()),
    );
    let read = |bench: &Bench<RocmAccelerator>| {
        let mut got = vec![0; 4096];
        bench.ram.read_exact_at(&mut got, 0x2000).unwrap();
        got
    };
    let scaled = |by: f32| -> Vec<u8> {
        (0..1024u16).flat_map(|number| (f32::from(number) * by).to_le_bytes()).collect()
    };
    assert!(read(&bench) == scaled(0.5));
    bench.check(
        |batch| {
            batch.copy((1, 0), (2, 0), 4096)?;
            batch.fence()
        },
        Ok(()),
    );
    assert!(read(&bench) == scaled(0.25));

    // What never ends is stopped, and the next one runs.
    let spin = |batch: &mut BatchWriter<'_>, fuel| {
        batch.fill(Span { buffer: 2, offset: 0, bytes: 4 }, 0)?;
        batch.launch_with_fuel(1, 1, [1; 3], fuel, &[Argument::view(2, 0, &[1])?])?;
        batch.fence()
    };
    bench.check(|batch| spin(batch, 1000), Err((2, Status::OutOfFuel)));
    let start = Instant::now();
    bench.check(|batch| spin(batch, 0), Err((2, Status::Deadline)));
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    bench.check(
        |batch| {
            half(batch, 2, 1024)?;
            batch.fence()
        },
        Ok(()),
    );

    // The quota is the guest's, whatever the device has.
    bench.check(|batch| batch.create_buffer(3, QUOTA), Err((0, Status::Quota)));
    bench.check(|batch| half(batch, 9, 64), Err((0, Status::NoSuch)));
    bench.check(|batch| half(batch, 1, 2048), Err((0, Status::Arguments)));
    let other = module("kernel @other(@x: view<f32, [4], read>) at 0x1 block(32) {}");
    // LLVM takes it, and the fake is not told what to run.
    let reply = bench.run(|batch| batch.create_module(2, &other));
    assert!(Reply::decode(&reply).unwrap().check().is_err());
    assert_eq!(fake.faults(), Vec::<String>::new());
}

#[test]
fn a_worker_opens_it_by_its_address() {
    let (fake, roots, _root) = match gpu("0000:66:00.0") {
        Ok(gpu) => gpu,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let open = |address| {
        backend::open_amd(&roots, address, QUOTA, Duration::from_secs(10), assembler::here().unwrap())
    };
    let opened = open("0000:66:00.0").unwrap_or_else(|reason| panic!("{reason}"));
    assert_eq!(opened.target, "amdgcn:gfx942");
    drop(opened);
    let Err(reason) = open("0000:67:00.0") else { panic!("there is no such GPU") };
    assert!(reason.contains("0000:67:00.0 is an AMD GPU that the compute driver does not list"), "{reason}");
    // The warm-up fails where it computes nothing.
    fake.fail("hipModuleLoadData", 0, 200);
    let Err(reason) = open("0000:66:00.0") else { panic!("nothing can be loaded") };
    assert!(reason.contains("its first kernel failed"), "{reason}");
}
