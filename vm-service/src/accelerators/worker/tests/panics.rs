//! Compilers and threads that panic, which is reported.

use std::sync::mpsc::channel;

use super::*;
use crate::accelerators::worker::link::{Link, Request};
use crate::accelerators::worker::server::Answer;

/// Panics instead of compiling.
struct Panics;

impl Compile for Panics {
    fn target(&self) -> &str {
        "fake"
    }

    fn compile(&self, _module: &ValidModule) -> Result<Vec<Artifact>, String> {
        panic!("planted in the compiler")
    }
}

/// A queue with one batch and no end, whose answer panics.
struct OneBatch(Mutex<Option<Vec<u8>>>);

impl Link for OneBatch {
    type Place = ();

    fn next(&self) -> Result<Option<Request<()>>, String> {
        let batch = self.0.lock().unwrap().take();
        if batch.is_none() {
            // A guest that waits for its answer.
            std::thread::sleep(Duration::from_secs(60));
        }
        Ok(Some(Request { batch, place: (), room: MAX_REPLY_BYTES }))
    }

    fn ready(&self) -> bool {
        false
    }

    fn answer(&self, _place: &(), _answer: &Answer) -> Result<(), String> {
        panic!("planted in the answer")
    }
}

#[test]
fn a_thread_that_panics_breaks_the_guest() {
    type Fill = fn(&mut BatchWriter<'_>) -> Result<(), NoRoom>;
    let cases: [(Fill, &[&str]); 2] = [
        (|batch| batch.create_module(1, &add_and_spin()), &["serves the guest"]),
        // Whichever sees its end.
        (|batch| batch.fence(), &["waits for fences", "serves the guest"]),
    ];
    for (fill, threads) in cases {
        let mut bytes = vec![0; 4096];
        let mut writer = BatchWriter::new(&mut bytes).unwrap();
        fill(&mut writer).unwrap();
        let len = writer.finish();
        bytes.truncate(len);
        let ram = Arc::new(Ram::new(&[], Vec::new()).unwrap());
        let (broken, breaks) = channel();
        let worker: Worker<_> =
            Worker::start(Arc::new(FakeAccelerator::new()), WorkerOptions::default()).unwrap();
        let guest = Guest::new(&orders(None), ram, Meter::new().unwrap(), Watch::default(), broken).unwrap();
        // As the worker's main thread does.
        std::thread::spawn(move || {
            let link = OneBatch(Mutex::new(Some(bytes)));
            if let Err(reason) = serve(&worker, Compiler::Kernels(Arc::new(Panics)), link, &guest) {
                guest.broken(reason);
            }
        });
        let reason = breaks.recv_timeout(Duration::from_secs(30)).expect("nothing was reported");
        let told = threads.iter().any(|thread| reason.contains(thread));
        assert!(told && reason.contains("panicked"), "{reason}");
    }
}

/// Compiles as workers do, and answers with the programs of the kernels' names.
struct Jit;

impl Compile for Jit {
    fn target(&self) -> &str {
        "cpu:x86-64-v3"
    }

    fn compile(&self, module: &ValidModule) -> Result<Vec<Artifact>, String> {
        vm_jit::compile(module, &self.target().parse().unwrap()).map_err(|error| error.to_string())?;
        ByName.compile(module)
    }
}

#[test]
fn a_compiler_that_panics_fails_the_module() {
    for phase in ["judge", "legalise", "write"] {
        let mut bench = Bench::compiling(Arc::new(Jit));
        let planted = module(&format!("kernel @panics_in_{phase}() at 0x1 block(32) {{}}"));
        let reply = bench.run(|batch| batch.create_module(1, &planted));
        assert_eq!(Reply::decode(&reply).unwrap().check(), Err((0, Status::Module)), "{phase}");
        let log = bench.log().concat();
        assert!(log.contains(&format!("@panics_in_{phase}")) && log.contains("it panicked"), "{log}");
        bench.check(|batch| batch.create_module(1, &add_and_spin()), Ok(()));
    }
}
