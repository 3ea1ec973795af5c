//! Makes initial RAM disks: L1's, and the one of Linux guests in L2.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{Programs, workspace};
use crate::agent::CLOUD_HYPERVISOR;
use crate::cpio::Archive;
use crate::provision::{LinuxKernel, libraries_of, qemu_files, systemd_files};
use crate::scenario::Contents;

/// Makes L1's initial RAM disk. A Linux guest's is made beside it, and put into it.
pub(super) fn make_l1(
    path: &Path,
    programs: &Programs,
    kernel: &LinuxKernel,
    contents: Contents,
) -> Result<()> {
    let mut tree = Tree::create(path)?;
    tree.machine(programs, kernel, false)?;
    tree.program("bin/vm-service", &programs.vm_service)?;
    if contents.linux_guest {
        let guest = path.with_file_name("guest.cpio");
        let mut inner = Tree::create(&guest)?;
        inner.machine(programs, kernel, contents.cupy)?;
        // What other scenarios asked for is built, too, and would only take this guest's memory.
        if contents.examples {
            for (place, program) in &programs.examples {
                inner.program(place, program)?;
            }
        }
        if let Some(python) = programs.python.as_ref().filter(|_| contents.python) {
            inner.tree("python", python, python)?;
        }
        if let Some(cuda) = programs.cuda.as_ref().filter(|_| contents.cuda) {
            inner.program("cuda/libcuda.so.1", &cuda.bridge)?;
            inner.program("cuda/program", &cuda.program)?;
        }
        inner.finish()?;
        tree.file("guest/initrd", 0o644, &guest)?;
        tree.file("guest/kernel", 0o644, &kernel.image)?;
    }
    if let Some(python) = programs.python.as_ref().filter(|_| contents.python_in_l1) {
        tree.tree("python", python, python)?;
    }
    if let Some(cuda) = programs.cuda.as_ref().filter(|_| contents.cuda) {
        tree.program("bin/libvm_cuda_cpu.so", &cuda.driver)?;
    }
    if contents.bare_guest {
        tree.file("guest/bare", 0o755, built(&programs.bare_guest)?)?;
    }
    if contents.library_examples {
        for (name, program) in &programs.library_examples {
            tree.program(name.trim_start_matches('/'), program)?;
        }
    }
    if contents.systemd {
        for path in systemd_files()? {
            let place = path.display().to_string();
            let source = std::fs::canonicalize(&path)?;
            match path.extension() {
                Some(_) => tree.file(place.trim_start_matches('/'), 0o644, &source)?,
                None => tree.program(place.trim_start_matches('/'), &source)?,
            }
        }
        let folders = ["vm-service/package", "vm-service/package/enabled"];
        let folders = folders.map(|folder| std::fs::read_dir(workspace().join(folder)));
        for entry in folders.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten() {
            let unit = entry?.path();
            if unit.extension().is_some_and(|kind| kind == "service" || kind == "socket") {
                let name = unit.file_name().unwrap_or_default().to_string_lossy();
                tree.file(&format!("etc/systemd/system/{name}"), 0o644, &unit)?;
            }
        }
    }
    if contents.peers {
        for (place, source) in qemu_files()? {
            tree.file(&place, 0o755, &source)?;
        }
        if let Some(program) = &programs.cloud_hypervisor {
            tree.file(CLOUD_HYPERVISOR.trim_start_matches('/'), 0o755, program)?;
        }
    }
    tree.finish()
}

/// A program that a scenario needs.
fn built(program: &Option<PathBuf>) -> Result<&Path> {
    program.as_deref().context("a program of the scenario was not built")
}

/// An archive that makes the directories its files need.
struct Tree {
    archive: Archive<BufWriter<File>>,
    directories: BTreeSet<String>,
    libraries: BTreeSet<String>,
    path: String,
}

impl Tree {
    fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).with_context(|| format!("can't create {}", path.display()))?;
        let archive = Archive::new(BufWriter::new(file));
        Ok(Self {
            archive,
            directories: BTreeSet::new(),
            libraries: BTreeSet::new(),
            path: path.display().to_string(),
        })
    }

    /// What every Linux of the testbed has: the agent as init, and the modules, with those of ext4 or without.
    fn machine(&mut self, programs: &Programs, kernel: &LinuxKernel, ext4: bool) -> Result<()> {
        for directory in ["dev", "proc", "sys", "run", "tmp"] {
            self.archive.directory(directory)?;
        }
        self.program("init", &programs.agent)?;
        let mut order = String::new();
        for module in kernel.modules.iter().chain(kernel.ext4.iter().filter(|_| ext4)) {
            let name = module.file_name().unwrap_or_default().to_string_lossy().into_owned();
            self.file(&format!("modules/{name}"), 0o644, module)?;
            order.push_str(&name);
            order.push('\n');
        }
        self.directory("modules")?;
        self.archive.bytes("modules/order", 0o644, order.as_bytes())?;
        Ok(())
    }

    /// A program, with the libraries that it needs and that are not there yet.
    fn program(&mut self, name: &str, source: &Path) -> Result<()> {
        self.libraries(source, source)?;
        self.file(name, 0o755, source)
    }

    /// The libraries of a program that are not there yet, but those below `except`.
    fn libraries(&mut self, source: &Path, except: &Path) -> Result<()> {
        for library in libraries_of(&source.display().to_string())? {
            let place = library.trim_start_matches('/');
            if !Path::new(&library).starts_with(except) && self.libraries.insert(place.to_owned()) {
                let source =
                    std::fs::canonicalize(&library).with_context(|| format!("there is no {library}"))?;
                self.file(place, 0o755, &source)?;
            }
        }
        Ok(())
    }

    /// A directory with all below it, and with the libraries of its programs that are not in it, too.
    fn tree(&mut self, name: &str, source: &Path, root: &Path) -> Result<()> {
        let read = || format!("can't read {}", source.display());
        let mut entries: Vec<PathBuf> = std::fs::read_dir(source)
            .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
            .with_context(read)?;
        entries.sort();
        for path in entries {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let place = format!("{name}/{file}");
            if path.is_dir() {
                self.tree(&place, &path, root)?;
            } else if source.ends_with("bin") || file.contains(".so") {
                self.libraries(&path, root)?;
                self.file(&place, 0o755, &path)?;
            } else {
                self.file(&place, 0o644, &path)?;
            }
        }
        Ok(())
    }

    fn directory(&mut self, name: &str) -> Result<()> {
        if !name.is_empty() && !self.directories.contains(name) {
            if let Some((parent, _)) = name.rsplit_once('/') {
                self.directory(parent)?;
            }
            self.archive.directory(name)?;
            self.directories.insert(name.to_owned());
        }
        Ok(())
    }

    fn file(&mut self, name: &str, mode: u32, source: &Path) -> Result<()> {
        if let Some((parent, _)) = name.rsplit_once('/') {
            self.directory(parent)?;
        }
        self.archive
            .file(name, mode, source)
            .with_context(|| format!("can't put {} into {}", source.display(), self.path))
    }

    fn finish(self) -> Result<()> {
        let path = self.path;
        self.archive.finish().and_then(|mut out| out.flush()).with_context(|| format!("can't write {path}"))
    }
}
