//! LLVM IR to a code object, in processes of their own with limits.
//!
//! LLVM is millions of lines, and not made for what strangers send. What a guest sent becomes LLVM IR that it reads, so
//! `llc` and `ld.lld` run outside the caller's process, with a deadline, a limit on memory and on output, and no
//! descriptors but their own. They need no GPU and no ROCm, and some 40 ms for a small kernel. [`Assembler::find`] looks
//! for them.
//!
//! What comes back is looked at before anyone gives it to a driver: an ELF file for the chip whose parts lie within it,
//! with a descriptor for each kernel of the IR.
//!
//! ```
//! use vm_rocm::assemble::Assembler;
//!
//! let ir = "define amdgpu_kernel void @nothing() { ret void }";
//! match Assembler::find() {
//!     Ok(assembler) => assert!(assembler.assemble(ir.as_bytes(), "gfx942")?.starts_with(b"\x7fELF")),
//!     Err(error) => println!("skipped: {error}"),
//! }
//! # Ok::<(), vm_rocm::assemble::AssembleError>(())
//! ```

mod find;
mod object;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use vm_assemble::find::{identity, libraries};
use vm_assemble::{Job, Memory, Program, Scratch, failed};

pub use find::VARIABLE;
pub use vm_assemble::{AssembleError, Limits, end_all};

/// Makes code objects of LLVM IR, in processes with limits. Any number of threads may use one.
#[derive(Clone, Debug)]
pub struct Assembler {
    llc: PathBuf,
    lld: PathBuf,
    limits: Limits,
    level: u8,
    /// What the programs load: most of LLVM is in its library.
    libraries: Arc<OnceLock<Vec<PathBuf>>>,
}

impl Assembler {
    /// The machine's LLVM: the programs in the folder that [`VARIABLE`] names, else `llc-22` and `ld.lld-22` in `PATH` or
    /// where Debian's packages put them, else those of ROCm, in `ROCM_PATH` or `/opt/rocm`, else `llc` and `ld.lld` in
    /// `PATH`.
    ///
    /// # Errors
    /// [`AssembleError::Missing`], with the places.
    pub fn find() -> Result<Self, AssembleError> {
        find::llvm().map(|[llc, lld]| Self::llvm(llc, lld))
    }

    /// These programs: LLVM's `llc` and `ld.lld`.
    pub fn llvm(llc: impl Into<PathBuf>, lld: impl Into<PathBuf>) -> Self {
        let (llc, lld, libraries) = (llc.into(), lld.into(), Arc::default());
        Self { llc, lld, limits: Limits::default(), level: 2, libraries }
    }

    /// With other limits. That on memory is on the address space of each process; both share the time.
    #[must_use]
    pub fn limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// With a level of optimisation from 0 to 3; 2 without.
    #[must_use]
    pub fn level(self, level: u8) -> Self {
        Self { level: level.min(3), ..self }
    }

    /// The program that makes machine code.
    pub fn program(&self) -> &Path {
        &self.llc
    }

    /// The program that links it.
    pub fn linker(&self) -> &Path {
        &self.lld
    }

    /// What tells what this makes from what others do: the programs and their shared libraries, as they are now, and their options.
    pub fn identity(&self) -> String {
        let programs = [&self.llc, &self.lld];
        let libraries = self.libraries.get_or_init(|| {
            let mut all: Vec<_> = programs.iter().flat_map(|program| libraries(program)).collect();
            all.sort();
            all.dedup();
            all
        });
        let files = programs.into_iter().chain(libraries).map(|file| identity(file));
        format!("llvm O{} {}", self.level, files.collect::<Vec<_>>().join(" "))
    }

    /// The code object of this LLVM IR, as text, for a chip such as `gfx942`. It runs on every such chip, whatever its
    /// driver has set of XNACK and SRAM ECC.
    ///
    /// # Errors
    /// [`AssembleError`], with what LLVM said. Its processes have ended by then, with all that they started.
    pub fn assemble(&self, llvm_ir: &[u8], chip: &str) -> Result<Vec<u8>, AssembleError> {
        let name = chip.strip_prefix("gfx").unwrap_or_default();
        if name.is_empty() || name.len() > 8 || !name.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            let wanted = "one is gfx and a number, such as gfx942";
            return Err(AssembleError::Architecture { name: chip.to_owned(), wanted });
        }
        let deadline = self.limits.deadline();
        let input = Scratch::of("llvm-ir", llvm_ir).map_err(failed(&self.llc, "making its input"))?;
        let options = [
            "-mtriple=amdgcn-amd-amdhsa".into(),
            format!("-mcpu={chip}"),
            format!("-O{}", self.level),
            "-filetype=obj".into(),
        ];
        let object = self.run(&self.llc, options, &input, deadline)?;
        // Its threads would each reserve address space, and there is little to do.
        let code = self.run(&self.lld, ["-shared".into(), "--threads=1".into()], &object, deadline)?;
        let code = code.read(self.limits.output).map_err(failed(&self.lld, "reading its output"))?;
        match object::check(&code, chip, llvm_ir) {
            Ok(()) => Ok(code),
            Err(reason) => Err(AssembleError::NoCode { program: self.lld.display().to_string(), reason }),
        }
    }

    /// Runs one of the programs on a file; gives what it printed.
    fn run(
        &self,
        program: &Path,
        options: impl IntoIterator<Item = String>,
        input: &Scratch,
        deadline: Instant,
    ) -> Result<Scratch, AssembleError> {
        let mut arguments: Vec<OsString> = options.into_iter().map(OsString::from).collect();
        // To the name of a file in memory the linker can't write.
        arguments.extend(["-o".into(), "-".into(), input.path()]);
        let output = Scratch::new("object").map_err(failed(program, "making its output"))?;
        let program = Program {
            path: program,
            arguments,
            // Where it crashes, no further program is asked for names.
            environment: vec![("LLVM_DISABLE_SYMBOLIZATION".into(), "1".into())],
            memory: Memory::Space,
            prints: true,
            limits: self.limits,
        };
        Job::start(program, output, &[input])?.end(deadline)
    }
}
