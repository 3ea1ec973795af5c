//! The file that a kernel comes in: a module as text (`.vir`) or in its binary form.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use vm_graph::ValidGraph;
use vm_graph::limits::MAX_BYTES;
use vm_ir::limits::MAX_MODULE_BYTES;
use vm_ir::{Kernel, Module, Trust, ValidModule, binary, text, validate};

use crate::config::open_file;
use crate::failure::Failure;

/// A module that was read and validated.
#[derive(Clone, Debug)]
pub(crate) struct Loaded {
    /// The module.
    pub(crate) module: ValidModule,
    /// The text that it was read from, by which errors show their lines; empty for the binary form.
    pub(crate) source: Arc<str>,
}

/// Reads a module and validates it.
///
/// # Errors
/// When the file can't be read, is no module, or breaks a rule; each message begins with the file.
pub(crate) fn load(path: &Path, trust: Trust) -> Result<Loaded, Failure> {
    let bytes = read(path, MAX_MODULE_BYTES)?;
    let wrong = |error: String| Failure::usage(format_args!("{}: {error}", path.display()));
    let (module, source) = parse(&bytes).map_err(wrong)?;
    let module = validate(module, trust)
        .map_err(|errors| Failure::usage(behind(path, errors.0.iter().map(|error| error.render(source)))))?;
    Ok(Loaded { module, source: source.into() })
}

/// That what is written to a path does not take the place of the kernels' own file.
///
/// # Errors
/// It would take the place of the kernels.
pub(crate) fn spare(kernels: &Path, path: &Path) -> Result<(), Failure> {
    let of = |path: &Path| path.metadata().map(|file| (file.dev(), file.ino()));
    match (of(kernels), of(path)) {
        (Ok(kernels), Ok(output)) if kernels == output => Err(Failure::usage(format_args!(
            "{} is the file of the kernels, which would be lost; write to another one",
            path.display()
        ))),
        _ => Ok(()),
    }
}

/// Messages, each behind the file that it is about.
pub(crate) fn behind(path: &Path, messages: impl Iterator<Item = String>) -> String {
    let messages: Vec<_> = messages.map(|message| format!("{}: {message}", path.display())).collect();
    messages.join("\nerror: ")
}

/// Does a file have a model, not kernels? Its binary form says so; as JSON it begins with a brace, which no text of kernels does.
///
/// # Errors
/// When it can't be read.
pub(crate) fn is_graph(path: &Path) -> Result<bool, Failure> {
    const BEGIN: u64 = 4096;
    let mut bytes = Vec::new();
    open(path)?.take(BEGIN).read_to_end(&mut bytes).map_err(|error| unread(path, error))?;
    Ok(looks_like_graph(&bytes))
}

fn looks_like_graph(bytes: &[u8]) -> bool {
    bytes.starts_with(&vm_graph::MAGIC) || bytes.trim_ascii_start().first() == Some(&b'{')
}

/// Reads a model and validates it.
///
/// # Errors
/// As [`load`].
pub(crate) fn load_graph(path: &Path) -> Result<ValidGraph, Failure> {
    let bytes = read(path, MAX_BYTES)?;
    let wrong = |error: String| Failure::usage(format_args!("{}: {error}", path.display()));
    let graph = match bytes.first() {
        _ if !looks_like_graph(&bytes) => {
            return Err(wrong(
                "these are kernels, or nothing that is known; a model is .vgr, or JSON".to_owned(),
            ));
        }
        Some(0) => vm_graph::decode(&bytes).map_err(|error| wrong(error.to_string()))?,
        _ => serde_json::from_slice(&bytes).map_err(|error| wrong(format!("no model: {error}")))?,
    };
    vm_graph::validate(graph).map_err(|error| wrong(error.to_string()))
}

fn unread(path: &Path, error: io::Error) -> Failure {
    let shown = path.display();
    Failure::usage(format_args!("{shown} can't be read: {error}; name a kernel file, as in softmax.vir"))
}

fn open(path: &Path) -> Result<File, Failure> {
    // A FIFO would be waited for, and a device may have no end.
    let file = open_file(path, false).map_err(|error| unread(path, error))?;
    if !file.metadata().map_err(|error| unread(path, error))?.is_file() {
        let shown = path.display();
        return Err(Failure::usage(format_args!(
            "{shown} is no regular file; name a kernel file, as in softmax.vir"
        )));
    }
    Ok(file)
}

fn read(path: &Path, most: usize) -> Result<Vec<u8>, Failure> {
    let shown = path.display();
    let mut bytes = Vec::new();
    open(path)?.take(most as u64 + 1).read_to_end(&mut bytes).map_err(|error| unread(path, error))?;
    if bytes.len() > most {
        return Err(Failure::usage(format_args!(
            "{shown} has more than {most} bytes; split it into smaller ones"
        )));
    }
    Ok(bytes)
}

/// A module in either form, and the text of the one: the binary one begins with a zero byte, which no text has.
fn parse(bytes: &[u8]) -> Result<(Module, &str), String> {
    if bytes.first() == Some(&0) {
        return Ok((binary::decode(bytes).map_err(|error| error.to_string())?, ""));
    }
    let text = str::from_utf8(bytes).map_err(|error| {
        format!("byte {} is not UTF-8, so this is neither the text nor the binary form", error.valid_up_to())
    })?;
    Ok((text::parse(text).map_err(|error| error.render(text))?, text))
}

/// The kernel with a name, or the only one there is.
///
/// # Errors
/// When there is no such kernel, or several and no name.
pub(crate) fn choose<'m>(path: &Path, module: &'m Module, name: Option<&str>) -> Result<&'m Kernel, Failure> {
    let shown = path.display();
    let all = || {
        let names: Vec<_> = module.kernels().iter().map(|kernel| format!("@{}", kernel.name())).collect();
        names.join(", ")
    };
    match (name, module.kernels()) {
        (_, []) => Err(Failure::usage(format_args!("{shown} has no kernel"))),
        (Some(name), _) => {
            let name = name.strip_prefix('@').unwrap_or(name);
            module.kernel(name).ok_or_else(|| {
                Failure::usage(format_args!("{shown} has no kernel @{name}; it has {}", all()))
            })
        }
        (None, [only]) => Ok(only),
        (None, _) => Err(Failure::usage(format_args!(
            "{shown} has several kernels; choose one with --kernel: {}",
            all()
        ))),
    }
}
