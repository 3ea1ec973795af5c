//! Kernel modules: which ones a set of modules needs, in the order in which they can be loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// All module files below `root`, by module name.
pub(super) fn find(root: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut directories = vec![root.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in
            std::fs::read_dir(&directory).with_context(|| format!("can't read {}", directory.display()))?
        {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                directories.push(entry.path());
            } else if kind.is_file()
                && let Some(name) = entry.file_name().to_str().and_then(module_name)
            {
                found.insert(name, entry.path());
            }
        }
    }
    Ok(found)
}

/// The module's name, in which `-` and `_` are the same, if the file is a module.
fn module_name(file: &str) -> Option<String> {
    let (stem, _) = file.split_once(".ko")?;
    Some(stem.replace('-', "_"))
}

/// The names in a module's `depends=` entry (its `.modinfo` section is a list of NUL-terminated `key=value`).
pub(super) fn depends(module: &[u8]) -> Vec<String> {
    let key = b"\0depends=";
    let Some(at) = module.windows(key.len()).position(|window| window == key) else { return Vec::new() };
    let value = &module[at + key.len()..];
    let value = &value[..value.iter().position(|&byte| byte == 0).unwrap_or(value.len())];
    let value = String::from_utf8_lossy(value);
    value.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

/// Calls `visit` on every wanted module and what it needs, dependencies first. `read` gives a module's content.
pub(super) fn in_load_order(
    wanted: &[&str],
    read: &mut dyn FnMut(&str) -> Result<Vec<u8>>,
    visit: &mut dyn FnMut(&str, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut seen = BTreeSet::new();
    for name in wanted {
        load_after_dependencies(&name.replace('-', "_"), &mut seen, read, visit)?;
    }
    Ok(())
}

fn load_after_dependencies(
    name: &str,
    seen: &mut BTreeSet<String>,
    read: &mut dyn FnMut(&str) -> Result<Vec<u8>>,
    visit: &mut dyn FnMut(&str, &[u8]) -> Result<()>,
) -> Result<()> {
    if !seen.insert(name.to_owned()) {
        return Ok(());
    }
    let content = read(name)?;
    for dependency in depends(&content) {
        load_after_dependencies(&dependency, seen, read, visit)?;
    }
    visit(name, &content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_come_first_and_once() {
        let depends_of = BTreeMap::from([("a", "b,c-d"), ("b", "c_d"), ("c_d", ""), ("e", "a")]);
        let mut order = Vec::new();
        in_load_order(
            &["a", "e", "c-d"],
            &mut |name| Ok(format!("license=GPL\0depends={}\0name=x\0", depends_of[name]).into_bytes()),
            &mut |name, _| {
                order.push(name.to_owned());
                Ok(())
            },
        )
        .unwrap();
        assert_eq!(order, ["c_d", "b", "a", "e"]);
    }

    #[test]
    fn module_files_are_recognised() {
        assert_eq!(module_name("vfio-pci.ko.xz").as_deref(), Some("vfio_pci"));
        assert_eq!(module_name("kvm.ko").as_deref(), Some("kvm"));
        assert_eq!(module_name("modules.order"), None);
    }
}
