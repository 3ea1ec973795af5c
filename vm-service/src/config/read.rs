//! From the text of a guest file to a [`GuestConfig`], with every mistake at its place.
//!
//! The TOML is walked value by value, so that a message can name the key, what is there and what is allowed, and so
//! that all mistakes are reported at once.

use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::Problem;

use super::{
    AcceleratorDevice, Boot, ConfigError, Disk, GuestConfig, HUGEPAGE_SIZES, MAX_CMDLINE, MAX_DISKS,
    MAX_FILE, MAX_HOT_PLUG_SLOTS, MAX_MEMORY, MAX_NAME, MAX_NUMA_NODES, MEMORY_STEP, MIN_MEMORY, format_size,
    parse_size,
};
use crate::os::sandbox::Measure;

/// What `vcpus` may be.
const VCPUS: &str = "write a number from 1 to 255";
/// What `memory` may be.
const MEMORY: &str = "write a size from 2M to 16T in steps of 2M, as in \"512M\" or \"4G\"";
/// What `hugepages` may be.
const HUGEPAGES: &str = "write \"2M\" or \"1G\", or leave it out";
/// What `numa_nodes` may be.
const NUMA_NODES: &str =
    "write a list of up to 8 different numbers of nodes of the host, as in [0, 1], or leave it out";
/// What `hot_plug_slots` may be.
const HOT_PLUG_SLOTS: &str = "write a number from 0 to 16";
/// The measures that can be waived for the processes of a guest, but for those that serve CUDA programs: what vCPUs and kernels
/// need of system calls is known.
pub(crate) const GUEST_WAIVERS: [Measure; 2] = [Measure::User, Measure::Files];
/// Most mistakes that are reported at once.
const MAX_PROBLEMS: usize = 20;

impl GuestConfig {
    /// Reads a guest from the text of its TOML file. Relative paths in it start at the directory of `file`, which is
    /// not read.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with every mistake, in order of their place.
    pub fn parse(text: &str, file: &Path) -> Result<Self, ConfigError> {
        if text.len() > MAX_FILE {
            return Err(ConfigError::NotText {
                file: file.into(),
                reason: "it is larger than 1 MiB; a guest file takes a few lines".into(),
            });
        }
        Self::read(text, file).map(|(guest, _)| guest)
    }

    /// The text of a guest file with all paths absolute, so that it means the same in another directory. `file` is absolute.
    ///
    /// # Errors
    /// As for [`parse`](Self::parse).
    pub(crate) fn with_absolute_paths(text: &str, file: &Path) -> Result<String, ConfigError> {
        let (_, mut paths) = Self::read(text, file)?;
        paths.sort_by_key(|(at, _)| std::cmp::Reverse(at.start));
        let mut text = text.to_owned();
        for (at, path) in paths {
            text.replace_range(at, &toml::Value::from(&*path.to_string_lossy()).to_string());
        }
        Ok(text)
    }

    /// Reads a guest, and its paths with their places.
    fn read(text: &str, file: &Path) -> Result<(Self, Paths), ConfigError> {
        let mut reader = Reader { file, text, problems: Vec::new(), paths: Vec::new() };
        let (root, syntax) = DeTable::parse_recoverable(text);
        for error in syntax {
            let at = error.span().unwrap_or(0..0);
            let message = match (error.message(), text.get(at.clone())) {
                ("duplicate key", Some(key)) => format!("`{}` is given twice; keep one", shorten(key)),
                (message, _) => format!("this is not TOML: {}", message.replace('\n', ", ")),
            };
            reader.problem(at, message);
        }
        // What the parser recovered after a syntax error would only add misleading mistakes.
        let guest = if reader.problems.is_empty() { reader.guest(root.get_ref()) } else { None };
        match guest {
            Some(guest) if reader.problems.is_empty() => Ok((guest, reader.paths)),
            _ => Err(ConfigError::Invalid(reader.finish())),
        }
    }
}

/// A number of vCPUs on the command line.
///
/// # Errors
/// What may be written.
pub(crate) fn vcpus_argument(text: &str) -> Result<u8, &'static str> {
    vcpus(text, 10).ok_or(VCPUS)
}

/// A guest's memory on the command line, in bytes.
///
/// # Errors
/// What is wrong, and what may be written.
pub(crate) fn memory_argument(text: &str) -> Result<u64, String> {
    memory(text).map_err(|what| format!("it {what}; {MEMORY}"))
}

/// What is wrong with as much memory in huge pages of this size, if anything is.
pub(crate) fn uneven(memory: u64, hugepages: u64) -> Option<String> {
    let size = format_size(hugepages);
    let text = || {
        format!(
            "`memory` is \"{}\", no whole number of pages of {size}; write a multiple of {size}, or other `hugepages`",
            format_size(memory)
        )
    };
    (!memory.is_multiple_of(hugepages)).then(text)
}

/// Whether a guest may have this name. One that starts with `-` would be an option of the commands that it is an argument of.
pub(crate) fn is_name(text: &str) -> bool {
    (1..=MAX_NAME).contains(&text.len())
        && !text.starts_with('-')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

/// The names that guests may have.
pub(crate) fn name_rule() -> String {
    format!("use 1 to {MAX_NAME} letters, digits, `-` and `_`, of which the first is not `-`")
}

fn vcpus(digits: &str, radix: u32) -> Option<u8> {
    u8::from_str_radix(digits, radix).ok().filter(|&vcpus| vcpus > 0)
}

fn memory(text: &str) -> Result<u64, &'static str> {
    match parse_size(text)? {
        bytes if bytes < MIN_MEMORY => Err("is too small"),
        bytes if bytes > MAX_MEMORY => Err("is too large"),
        bytes if !bytes.is_multiple_of(MEMORY_STEP) => Err("is not a multiple of 2M"),
        bytes => Ok(bytes),
    }
}

/// A table of the file and how messages name it.
pub(super) struct Section<'t, 'i> {
    table: &'t DeTable<'i>,
    /// Its path with a final dot, as in `disks[0].`; empty for the whole file.
    path: String,
    /// Where it starts.
    at: Range<usize>,
}

/// A value of the file and how messages name it.
pub(super) struct Entry<'t, 'i> {
    pub(super) value: &'t DeValue<'i>,
    /// Its path, as in `disks[0].path`.
    pub(super) key: String,
    pub(super) at: Range<usize>,
}

pub(super) struct Reader<'a> {
    file: &'a Path,
    text: &'a str,
    problems: Vec<(usize, Problem)>,
    paths: Paths,
}

/// Paths that a file names, and where.
type Paths = Vec<(Range<usize>, PathBuf)>;

impl Reader<'_> {
    pub(super) fn problem(&mut self, at: Range<usize>, message: String) {
        // The bound keeps a hostile file from costing more than its own size.
        if self.problems.len() <= MAX_PROBLEMS {
            self.problems.push((at.start, Problem::new(self.file, self.text, at, message)));
        }
    }

    fn finish(mut self) -> Vec<Problem> {
        self.problems.sort_by_key(|(at, _)| *at);
        self.problems.truncate(MAX_PROBLEMS);
        self.problems.into_iter().map(|(_, problem)| problem).collect()
    }

    fn guest(&mut self, table: &DeTable<'_>) -> Option<GuestConfig> {
        let root = Section { table, path: String::new(), at: 0..0 };
        self.known(
            &root,
            &[
                "name",
                "vcpus",
                "memory",
                "hugepages",
                "numa_nodes",
                "boot",
                "devices",
                "peer_to_peer",
                "hot_plug_slots",
                "accelerators",
                "vsock",
                "disks",
                "net",
                "unconfined",
            ],
        );
        let name = self.required(&root, "name", "write name = \"NAME\"").and_then(|entry| self.name(&entry));
        let vcpus = match self.optional(&root, "vcpus") {
            Some(entry) => self.vcpus(&entry),
            None => Some(1),
        };
        let memory =
            self.required(&root, "memory", "write memory = \"512M\"").and_then(|entry| self.memory(&entry));
        let hugepages = self.optional(&root, "hugepages").and_then(|entry| self.hugepages(&entry));
        if let (Some(size), Some(memory)) = (hugepages, memory)
            && let Some(message) = uneven(memory, size)
        {
            self.problem(self.place(&root, "memory"), message);
        }
        let numa_nodes = self.optional(&root, "numa_nodes").and_then(|entry| self.numa_nodes(&entry));
        let boot = self
            .required(&root, "boot", "write a table [boot] with kernel = \"PATH\"")
            .and_then(|entry| self.section(&entry, "write it as a table: [boot]"))
            .and_then(|section| self.boot(&section));
        let (devices, settings) = self.devices(&root);
        let peer_to_peer = match self.optional(&root, "peer_to_peer") {
            Some(entry) => self.boolean(&entry),
            None => Some(true),
        };
        let hot_plug_slots =
            self.optional(&root, "hot_plug_slots").and_then(|entry| self.hot_plug_slots(&entry));
        let accelerators = self.accelerators(&root);
        for (index, accelerator) in accelerators.iter().enumerate() {
            if let AcceleratorDevice::Pci(address) = accelerator.device
                && devices.contains(&address)
            {
                let message = format!(
                    "`accelerators[{index}].device` is {address}, which the guest owns through `devices`; name it in one of \
                     the two"
                );
                self.problem(self.place(&root, "accelerators"), message);
            }
        }
        let in_place = accelerators.iter().position(|accelerator| accelerator.window.is_none());
        if let (Some(index), Some(_)) = (in_place, hugepages) {
            let message = format!(
                "`accelerators[{index}]` works on the guest's RAM in pages of 4K, and `hugepages` has it of others; give it a \
                 `window`, or leave `hugepages` out"
            );
            self.problem(self.place(&root, "accelerators"), message);
        }
        let vsock = self.vsock(&root);
        let disks = self.disks(&root);
        let nets = self.nets(&root);
        let unconfined = self.unconfined(&root, &GUEST_WAIVERS);
        let (name, vcpus, memory, boot, peer_to_peer) = (name?, vcpus?, memory?, boot?, peer_to_peer?);
        let unconfined = unconfined?;
        Some(GuestConfig {
            name,
            vcpus,
            memory,
            hugepages,
            numa_nodes,
            boot,
            devices,
            settings,
            peer_to_peer,
            hot_plug_slots,
            accelerators,
            vsock,
            disks,
            nets,
            unconfined,
        })
    }

    fn name(&mut self, entry: &Entry<'_, '_>) -> Option<String> {
        let rule = name_rule();
        let text = self.string(entry, &rule)?;
        let what = if text.is_empty() {
            "is empty"
        } else if text.len() > MAX_NAME {
            "is too long"
        } else if text.starts_with('-') {
            "starts with `-`"
        } else if !is_name(text) {
            "has a character that is not allowed"
        } else {
            return Some(text.to_owned());
        };
        self.wrong(entry, what, &rule)
    }

    /// The measures of a confinement that the operator waives, of those that `may` be waived.
    pub(super) fn unconfined(&mut self, section: &Section<'_, '_>, may: &[Measure]) -> Option<Vec<Measure>> {
        let Some(entry) = self.optional(section, "unconfined") else { return Some(Vec::new()) };
        let names: Vec<_> = may.iter().map(|measure| format!("\"{}\"", measure.name())).collect();
        let rule = format!("write a list of {}, each once, or leave it out", names.join(", "));
        let DeValue::Array(array) = entry.value else { return self.wrong_type(&entry, &rule) };
        let mut measures = Vec::new();
        for value in array {
            let named = match value.get_ref() {
                DeValue::String(text) => may.iter().copied().find(|measure| measure.name() == text),
                _ => None,
            };
            match named {
                Some(measure) if !measures.contains(&measure) => measures.push(measure),
                _ => return self.wrong(&entry, "has something else", &rule),
            }
        }
        Some(measures)
    }

    fn vcpus(&mut self, entry: &Entry<'_, '_>) -> Option<u8> {
        let DeValue::Integer(integer) = entry.value else { return self.wrong_type(entry, VCPUS) };
        let vcpus = vcpus(integer.as_str(), integer.radix());
        vcpus.or_else(|| self.wrong(entry, &format!("is {}", shorten(&integer.to_string())), VCPUS))
    }

    fn hot_plug_slots(&mut self, entry: &Entry<'_, '_>) -> Option<u8> {
        let DeValue::Integer(integer) = entry.value else { return self.wrong_type(entry, HOT_PLUG_SLOTS) };
        let slots = u8::from_str_radix(integer.as_str(), integer.radix()).ok();
        let slots = slots.filter(|&slots| slots <= MAX_HOT_PLUG_SLOTS);
        slots.or_else(|| self.wrong(entry, &format!("is {}", shorten(&integer.to_string())), HOT_PLUG_SLOTS))
    }

    fn memory(&mut self, entry: &Entry<'_, '_>) -> Option<u64> {
        let text = self.string(entry, MEMORY)?;
        match memory(text) {
            Ok(bytes) => Some(bytes),
            Err(what) => self.wrong(entry, &format!("is \"{}\", which {what}", shorten(text)), MEMORY),
        }
    }

    fn hugepages(&mut self, entry: &Entry<'_, '_>) -> Option<u64> {
        let text = self.string(entry, HUGEPAGES)?;
        match parse_size(text) {
            Ok(size) if HUGEPAGE_SIZES.contains(&size) => Some(size),
            _ => self.wrong(entry, &format!("is \"{}\"", shorten(text)), HUGEPAGES),
        }
    }

    fn numa_nodes(&mut self, entry: &Entry<'_, '_>) -> Option<Vec<u16>> {
        let DeValue::Array(array) = entry.value else { return self.wrong_type(entry, NUMA_NODES) };
        let mut nodes = Vec::new();
        for value in array {
            let number = match value.get_ref() {
                DeValue::Integer(integer) => u16::from_str_radix(integer.as_str(), integer.radix()).ok(),
                _ => None,
            };
            match number {
                Some(node) if !nodes.contains(&node) && nodes.len() < MAX_NUMA_NODES => nodes.push(node),
                _ => return self.wrong(entry, "is no list of them", NUMA_NODES),
            }
        }
        Some(nodes)
    }

    fn boot(&mut self, section: &Section<'_, '_>) -> Option<Boot> {
        self.known(section, &["kernel", "initrd", "cmdline"]);
        let kernel = self
            .required(section, "kernel", "write kernel = \"PATH\" of a bzImage, vmlinux or ELF program")
            .and_then(|entry| self.path(&entry));
        let initrd = self.optional(section, "initrd").map(|entry| self.path(&entry));
        let cmdline = self.optional(section, "cmdline").map(|entry| self.cmdline(&entry));
        Some(Boot {
            kernel: kernel?,
            initrd: match initrd {
                Some(initrd) => Some(initrd?),
                None => None,
            },
            cmdline: cmdline.unwrap_or_else(|| Some(String::new()))?,
        })
    }

    fn cmdline(&mut self, entry: &Entry<'_, '_>) -> Option<String> {
        let rule = format!("write at most {MAX_CMDLINE} bytes on one line, as in \"console=ttyS0\"");
        let text = self.string(entry, &rule)?;
        if text.len() > MAX_CMDLINE {
            self.wrong(entry, &format!("has {} bytes", text.len()), &rule)
        } else if text.chars().any(char::is_control) {
            self.wrong(entry, "has a control character", &rule)
        } else {
            Some(text.to_owned())
        }
    }

    fn disks(&mut self, root: &Section<'_, '_>) -> Vec<Disk> {
        const RULE: &str = "write [[disks]] with path = \"PATH\" for each";
        let mut disks: Vec<Disk> = Vec::new();
        for entry in self.list(root, "disks", MAX_DISKS, RULE) {
            let Some(section) = self.section(&entry, RULE) else { continue };
            self.known(&section, &["path", "read_only"]);
            let read_only = match self.optional(&section, "read_only") {
                Some(entry) => self.boolean(&entry),
                None => Some(false),
            };
            let Some(entry) = self.required(&section, "path", "write path = \"PATH\" of a raw disk image")
            else {
                continue;
            };
            let (Some(path), Some(read_only)) = (self.path(&entry), read_only) else { continue };
            if disks.iter().any(|disk| disk.path == path && !(disk.read_only && read_only)) {
                self.problem(
                    entry.at,
                    format!(
                        "`{}` is a disk of this guest already; give each disk its own file, or make both \
                         `read_only = true`",
                        entry.key
                    ),
                );
            }
            disks.push(Disk { path, read_only });
        }
        disks
    }

    /// Tells of every key of a table that is not in `allowed`.
    pub(super) fn known(&mut self, section: &Section<'_, '_>, allowed: &[&str]) {
        for key in section.table.keys() {
            let name: &str = key.get_ref();
            if allowed.contains(&name) {
                continue;
            }
            let mut message = format!("unknown key `{}{}`; ", section.path, shorten(name));
            match closest(name, allowed) {
                Some(meant) => message.push_str(&format!("did you mean `{meant}`?")),
                None => message.push_str(&format!("allowed here: {}", allowed.join(", "))),
            }
            self.problem(key.span(), message);
        }
    }

    /// Where a key of a table has its value.
    fn place(&self, section: &Section<'_, '_>, key: &str) -> Range<usize> {
        section.table.get(key).map_or(0..0, Spanned::span)
    }

    pub(super) fn optional<'t, 'i>(&self, section: &Section<'t, 'i>, key: &str) -> Option<Entry<'t, 'i>> {
        let value: &'t Spanned<DeValue<'i>> = section.table.get(key)?;
        Some(Entry { value: value.get_ref(), key: format!("{}{key}", section.path), at: value.span() })
    }

    pub(super) fn required<'t, 'i>(
        &mut self,
        section: &Section<'t, 'i>,
        key: &str,
        rule: &str,
    ) -> Option<Entry<'t, 'i>> {
        let entry = self.optional(section, key);
        if entry.is_none() {
            self.problem(section.at.clone(), format!("`{}{key}` is missing; {rule}", section.path));
        }
        entry
    }

    pub(super) fn section<'t, 'i>(&mut self, entry: &Entry<'t, 'i>, rule: &str) -> Option<Section<'t, 'i>> {
        match entry.value {
            DeValue::Table(table) => {
                Some(Section { table, path: format!("{}.", entry.key), at: entry.at.clone() })
            }
            _ => self.wrong_type(entry, rule),
        }
    }

    /// The values of an array that may be missing, at most `max`.
    pub(super) fn list<'t, 'i>(
        &mut self,
        root: &Section<'t, 'i>,
        key: &str,
        max: usize,
        rule: &str,
    ) -> Vec<Entry<'t, 'i>> {
        let Some(entry) = self.optional(root, key) else { return Vec::new() };
        let DeValue::Array(array) = entry.value else {
            let _: Option<()> = self.wrong_type(&entry, rule);
            return Vec::new();
        };
        if let Some(first) = array.get(max) {
            self.problem(
                first.span(),
                format!("`{key}` has {} entries; a guest has at most {max}", array.len()),
            );
        }
        let entry = |(i, value): (usize, &'t Spanned<DeValue<'i>>)| Entry {
            value: value.get_ref(),
            key: format!("{key}[{i}]"),
            at: value.span(),
        };
        array.iter().take(max).enumerate().map(entry).collect()
    }

    pub(super) fn string<'t>(&mut self, entry: &Entry<'t, '_>, rule: &str) -> Option<&'t str> {
        match entry.value {
            DeValue::String(text) => Some(text),
            _ => self.wrong_type(entry, rule),
        }
    }

    pub(super) fn boolean(&mut self, entry: &Entry<'_, '_>) -> Option<bool> {
        match entry.value {
            DeValue::Boolean(value) => Some(*value),
            _ => self.wrong_type(entry, "write true or false"),
        }
    }

    /// A path, made absolute if the guest file's is.
    pub(super) fn path(&mut self, entry: &Entry<'_, '_>) -> Option<PathBuf> {
        const RULE: &str = "write a path; a relative one starts at this file's directory";
        let text = self.string(entry, RULE)?;
        if text.is_empty() {
            return self.wrong(entry, "is empty", RULE);
        }
        if text.chars().any(char::is_control) {
            return self.wrong(entry, "has a control character", RULE);
        }
        let path = self.file.parent().unwrap_or(Path::new("")).join(text);
        self.paths.push((entry.at.clone(), path.clone()));
        Some(path)
    }

    pub(super) fn wrong<T>(&mut self, entry: &Entry<'_, '_>, what: &str, rule: &str) -> Option<T> {
        self.problem(entry.at.clone(), format!("`{}` {what}; {rule}", entry.key));
        None
    }

    pub(super) fn wrong_type<T>(&mut self, entry: &Entry<'_, '_>, rule: &str) -> Option<T> {
        let kind = match entry.value {
            DeValue::String(_) => "a string",
            DeValue::Integer(_) => "a number",
            DeValue::Float(_) => "a number with a fraction",
            DeValue::Boolean(_) => "true or false",
            DeValue::Datetime(_) => "a date or time",
            DeValue::Array(_) => "an array",
            DeValue::Table(_) => "a table",
        };
        self.wrong(entry, &format!("is {kind}"), rule)
    }
}

/// The allowed key that `name` is most likely a slip of.
fn closest<'a>(name: &str, allowed: &[&'a str]) -> Option<&'a str> {
    // The distance of long texts costs their product, and they are no slips.
    if name.len() > 2 * MAX_NAME {
        return None;
    }
    let distance = |key: &&str| strsim::damerau_levenshtein(&name.to_ascii_lowercase(), key);
    allowed
        .iter()
        .copied()
        .map(|key| (distance(&key), key))
        .min()
        .filter(|(d, key)| *d <= key.len() / 2)
        .map(|(_, k)| k)
}

/// `text` fit for a message: bounded, and with no control characters.
pub(super) fn shorten(text: &str) -> String {
    let mut short = printable(&text.chars().take(40).collect::<String>());
    if text.chars().nth(40).is_some() {
        short.push('…');
    }
    short
}

pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
