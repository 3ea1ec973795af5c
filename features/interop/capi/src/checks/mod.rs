//! What tests check of every function of the ABI, through a [`Caller`]: on the CPU, on a GPU, of this program or of a library that was loaded.

mod agree;
mod cases;
mod hostile;

pub use agree::{Run, agree, run};
pub use cases::check_case;
pub use hostile::refused;

use crate::sys::by_name::{Entry, Parameter, TABLE};
use crate::sys::vmk_status;

/// Bytes of an arena.
pub const ARENA: usize = 1 << 20;
/// How many arenas there are: one for each pointer of a call, and the workspace's.
pub const ARENAS: usize = 10;
/// The arena of the memory to work in.
pub const WORKSPACE: usize = ARENAS - 1;

/// Who calls functions, and has memory for them.
pub trait Caller {
    /// Calls a function with a word for each parameter, and waits for what it started.
    ///
    /// # Errors
    /// What the device said of what was started.
    fn call(&mut self, name: &str, words: &[u64]) -> Result<i32, String>;
    /// The text of the last error.
    fn last(&mut self) -> String;
    /// The address of an arena, of [`ARENA`] bytes, at a multiple of 256.
    fn arena(&self, number: usize) -> u64;
    /// Fills an arena from its beginning on.
    ///
    /// # Errors
    /// The device's.
    fn write(&mut self, number: usize, bytes: &[u8]) -> Result<(), String>;
    /// Reads an arena from its beginning on.
    ///
    /// # Errors
    /// The device's.
    fn read(&mut self, number: usize, bytes: &mut [u8]) -> Result<(), String>;
    /// What is given for the stream.
    fn stream(&self) -> u64;
}

/// Arguments by the names of parameters: small and odd ones, aligned ones that tensor cores and copying engines take, some in between.
pub const SHAPES: [&[(&str, i64)]; 3] = [
    &[
        ("n", 1001),
        ("size", 1001),
        ("batch", 3),
        ("dim", 130),
        ("cols", 130),
        ("vocab_size", 130),
        ("M", 7),
        ("N", 5),
        ("K", 3),
        ("in_dim", 7),
        ("out_dim", 5),
        ("seq_len", 5),
        ("n_heads", 2),
        ("head_dim", 6),
        ("k", 3),
        ("top_k", 2),
        ("count", 9),
        ("rows", 11),
        ("batch_seq", 13),
        ("n_experts", 10),
    ],
    &[
        ("n", 65_536),
        ("size", 65_536),
        ("batch", 2),
        ("dim", 4096),
        ("cols", 128),
        ("vocab_size", 8192),
        ("M", 128),
        ("N", 256),
        ("K", 128),
        ("in_dim", 256),
        ("out_dim", 128),
        ("seq_len", 128),
        ("n_heads", 4),
        ("head_dim", 64),
        ("k", 50),
        ("top_k", 2),
        ("count", 40),
        ("rows", 60),
        ("batch_seq", 256),
        ("n_experts", 64),
    ],
    &[
        ("n", 100_003),
        ("size", 100_003),
        ("batch", 2),
        ("dim", 1031),
        ("cols", 1100),
        ("vocab_size", 2057),
        ("M", 67),
        ("N", 71),
        ("K", 33),
        ("in_dim", 33),
        ("out_dim", 67),
        ("seq_len", 70),
        ("n_heads", 3),
        ("head_dim", 20),
        ("k", 7),
        ("top_k", 3),
        ("count", 37),
        ("rows", 50),
        ("batch_seq", 65),
        ("n_experts", 60),
    ],
];

/// The floats, likewise.
const FLOATS: [(&str, f32); 12] = [
    ("alpha", 0.75),
    ("beta", -0.5),
    ("scale", 0.7),
    ("eps", 1e-5),
    ("lr", 0.01),
    ("beta1", 0.9),
    ("beta2", 0.99),
    ("weight_decay", 0.01),
    ("clip_norm", 1.0),
    ("temperature", 0.8),
    ("top_p", 0.9),
    ("step", 0.0),
];

impl Parameter {
    /// Is it a pointer, but the stream?
    pub fn is_pointer(&self) -> bool {
        self.kind.ends_with('*') && self.name != "stream"
    }

    /// Is it memory to work in?
    pub fn is_workspace(&self) -> bool {
        self.scratch || self.name == "workspace"
    }

    /// Is what it points to written?
    pub fn is_written(&self) -> bool {
        !self.kind.starts_with("const")
    }

    /// Is it a count or an extent?
    pub fn is_extent(&self) -> bool {
        matches!(self.kind, "int" | "int64_t") && self.name != "step"
    }

    /// Bytes of what it points to.
    pub fn element(&self) -> u64 {
        match self.kind.trim_start_matches("const ").trim_end_matches(" *") {
            "bf16" | "f16" => 2,
            "int64_t" => 8,
            _ => 4,
        }
    }

    /// The word of a parameter that is no pointer.
    fn number(&self, shape: &[(&str, i64)]) -> u64 {
        match self.kind {
            "float" => {
                let known = FLOATS.iter().find(|(name, _)| *name == self.name);
                u64::from(known.map_or(0.5, |(_, number)| *number).to_bits())
            }
            "flag" => 1,
            _ if self.name == "step" => 3,
            _ => shape
                .iter()
                .find(|(name, _)| *name == self.name)
                .map_or(2, |(_, number)| *number)
                .cast_unsigned(),
        }
    }
}

impl Entry {
    /// The entries that start kernels.
    pub fn all() -> impl Iterator<Item = &'static Entry> {
        TABLE.iter().filter(|entry| !entry.name.ends_with("_workspace_size"))
    }

    /// The function's name, without a type and a form.
    pub fn function(&self) -> &'static str {
        let name = self.name.trim_end_matches("_ws");
        name.trim_end_matches("_bf16").trim_end_matches("_f16")
    }

    /// The function that tells how many bytes to work in it needs.
    fn workspace_size(&self) -> String {
        format!("{}_workspace_size", self.name.trim_end_matches("_ws"))
    }
}

/// The words of a call: each pointer is the beginning of an arena.
///
/// # Errors
/// What the function said that tells how much memory to work in is needed.
pub fn words(caller: &mut dyn Caller, entry: &Entry, shape: &[(&str, i64)]) -> Result<Vec<u64>, String> {
    let mut needed = 0;
    let size = entry.workspace_size();
    if let Some(known) = TABLE.iter().find(|known| known.name == size) {
        let numbers = known.parameters.iter().filter(|parameter| !parameter.kind.ends_with('*'));
        let mut given: Vec<u64> = numbers.map(|parameter| parameter.number(shape)).collect();
        given.push((&raw mut needed).expose_provenance() as u64);
        let status = caller.call(&size, &given)?;
        if status != vmk_status::VMK_SUCCESS as i32 {
            return Err(format!("{size}: {status}: {}", caller.last()));
        }
    }
    let mut arena = 0;
    let word = |parameter: &Parameter| match parameter.name {
        "stream" => caller.stream(),
        "workspace_bytes" => needed,
        _ if parameter.is_workspace() => caller.arena(WORKSPACE),
        _ if parameter.is_pointer() => {
            arena += 1;
            caller.arena(arena - 1)
        }
        _ => parameter.number(shape),
    };
    Ok(entry.parameters.iter().map(word).collect())
}
