//! Block devices as sysfs shows them: their nodes, and what is made of them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::{Host, files};

/// The directory of a block device.
pub(crate) fn directory(host: &Host, name: &str) -> PathBuf {
    host.sys.join("class/block").join(name)
}

/// Its number, as in `259:1`; `None` when it has no node, as a path of a multipath disk.
pub(crate) fn number(host: &Host, name: &str) -> Option<String> {
    files::read_trimmed(&directory(host, name).join("dev")).filter(|number| !number.is_empty())
}

/// What device-mapper calls it, if it is one of its own.
pub(crate) fn mapped(host: &Host, name: &str) -> Option<String> {
    files::read_trimmed(&directory(host, name).join("dm/name"))
}

/// Its name for people: `dm-3 (vg-root)`.
pub(crate) fn shown(host: &Host, name: &str) -> String {
    match mapped(host, name) {
        Some(mapped) => format!("{name} ({mapped})"),
        None => name.to_owned(),
    }
}

/// Its node. Where sysfs has `!` the node's name has a slash.
pub(crate) fn node(host: &Host, name: &str) -> PathBuf {
    host.dev.join(name.replace('!', "/"))
}

/// The paths by which it is opened, after links were followed.
pub(crate) fn nodes(host: &Host, name: &str) -> Vec<PathBuf> {
    let mapper = mapped(host, name).map(|mapped| host.dev.join("mapper").join(mapped));
    std::iter::once(node(host, name)).chain(mapper).collect()
}

/// What is made right of it: device-mapper, software RAID, bcache and DRBD name themselves here.
pub(crate) fn holders(host: &Host, name: &str) -> Vec<String> {
    files::names(&directory(host, name).join("holders")).unwrap_or_default()
}

/// All that is made of it, each with what it is made of, from below. One that holds itself does not go round forever.
pub(crate) fn stack(host: &Host, name: &str) -> Vec<(String, String)> {
    let mut seen = BTreeSet::from([name.to_owned()]);
    let mut pending = vec![name.to_owned()];
    let mut found = Vec::new();
    while let Some(below) = pending.pop() {
        for above in holders(host, &below) {
            if seen.insert(above.clone()) {
                pending.push(above.clone());
            }
            found.push((below.clone(), above));
        }
    }
    found
}

/// What sysfs calls the block device with this path below `/dev`, or would: links are followed. `None` for other paths.
pub(crate) fn name_of(host: &Host, path: &str) -> Option<String> {
    let below = Path::new(path.strip_prefix("/dev/")?);
    let node = host.dev.join(below);
    let dev = host.dev.canonicalize().unwrap_or_else(|_| host.dev.clone());
    let node = node.canonicalize().ok();
    let below = node.as_deref().and_then(|node| node.strip_prefix(&dev).ok()).unwrap_or(below);
    Some(below.to_str()?.replace('/', "!"))
}

/// Whether `name` is that of a block device that [`name_of`] answered, which may be a node of device-mapper.
pub(crate) fn is_named(host: &Host, name: &str, answered: &str) -> bool {
    name == answered
        || answered
            .strip_prefix("mapper!")
            .is_some_and(|mapper| mapped(host, name).as_deref() == Some(mapper))
}
