//! What the environment says: `VMM_MODE`, `VMM_LOG_LEVEL`, `VMM_LOG_FILE`, `VMM_QUOTA`, `VMM_RESERVE`, `VMM_STACKS`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::log::Level;

/// What the hook does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Allocations are virtual memory, which is moved.
    Vmm,
    /// The driver's own functions are called, and the calls logged.
    Monitor,
}

/// The environment's words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// `VMM_MODE`.
    pub mode: Mode,
    /// `VMM_LOG_LEVEL`.
    pub level: Level,
    /// `VMM_LOG_FILE`; standard error without it.
    pub file: Option<PathBuf>,
    /// `VMM_QUOTA`: bytes that the process may have of devices' memory.
    pub quota: Option<u64>,
    /// `VMM_RESERVE`: bytes of page-locked host memory that are kept for pauses.
    pub reserve: Option<u64>,
    /// `VMM_STACKS`: are call stacks of allocations recorded from the beginning?
    pub stacks: bool,
    /// What was not understood, and what is taken instead.
    pub wrong: Vec<String>,
}

impl Options {
    /// Those of this process, as they are at the first call: a library that is loaded before the program asks for them at once.
    pub fn get() -> &'static Self {
        static OPTIONS: OnceLock<Options> = OnceLock::new();
        OPTIONS.get_or_init(|| Self::of(|name| std::env::var_os(name)))
    }

    /// Those of variables.
    pub fn of(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let mut wrong = Vec::new();
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).map(|value| value.to_string_lossy().into_owned());
        let mut not = |name: &str, value: &str, may: &str, instead: &str| {
            wrong.push(format!("{name} is {value:?}: it may be {may}; {instead} is taken"));
        };
        let mode = match text("VMM_MODE").as_deref() {
            None | Some("VMM") => Mode::Vmm,
            Some("MONITOR") => Mode::Monitor,
            Some(value) => {
                not("VMM_MODE", value, "VMM or MONITOR", "VMM");
                Mode::Vmm
            }
        };
        let level = match text("VMM_LOG_LEVEL").as_deref() {
            None | Some("ERROR") => Level::Error,
            Some("INFO") => Level::Info,
            Some("DEBUG") => Level::Debug,
            Some(value) => {
                not("VMM_LOG_LEVEL", value, "ERROR, INFO or DEBUG", "ERROR");
                Level::Error
            }
        };
        let mut size = |name: &str, instead: &str| {
            let value = text(name)?;
            let bytes = bytes(&value);
            if bytes.is_none() {
                not(name, &value, "a number of bytes, with K, M, G or T behind it or not", instead);
            }
            bytes
        };
        let (quota, reserve) = (size("VMM_QUOTA", "no quota"), size("VMM_RESERVE", "no reserve"));
        let stacks = match text("VMM_STACKS").as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(value) => {
                not("VMM_STACKS", value, "0 or 1", "0");
                false
            }
        };
        // The program may go to another directory.
        let file = set("VMM_LOG_FILE").map(|file| std::path::absolute(&file).unwrap_or(file.into()));
        Self { mode, level, file, quota, reserve, stacks, wrong }
    }
}

/// Bytes, as in `512M`.
pub fn bytes(text: &str) -> Option<u64> {
    let (digits, unit) = match text.char_indices().last()? {
        (at, 'K') => (&text[..at], 10),
        (at, 'M') => (&text[..at], 20),
        (at, 'G') => (&text[..at], 30),
        (at, 'T') => (&text[..at], 40),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << unit)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;

    use super::*;

    #[test]
    fn what_is_not_understood_is_named() {
        let check = |name: &str, value: &str, wrong: usize, of: &dyn Fn(&Options) -> bool| {
            let options = Options::of(|asked| (asked == name).then(|| value.into()));
            assert!(options.wrong.len() == wrong && of(&options), "{name}={value}: {options:?}");
            assert!(options.wrong.iter().all(|text| text.contains(name) && text.contains(value)));
        };
        check("VMM_MODE", "MONITOR", 0, &|of| of.mode == Mode::Monitor);
        check("VMM_MODE", "monitor", 1, &|of| of.mode == Mode::Vmm);
        check("VMM_LOG_LEVEL", "DEBUG", 0, &|of| of.level == Level::Debug);
        check("VMM_LOG_LEVEL", "TRACE", 1, &|of| of.level == Level::Error);
        check("VMM_QUOTA", "3G", 0, &|of| of.quota == Some(3 << 30));
        check("VMM_QUOTA", "17", 0, &|of| of.quota == Some(17));
        check("VMM_QUOTA", "99999999999T", 1, &|of| of.quota.is_none());
        check("VMM_QUOTA", "-1", 1, &|of| of.quota.is_none());
        check("VMM_RESERVE", "16G", 0, &|of| of.reserve == Some(16 << 30));
        check("VMM_RESERVE", "much", 1, &|of| of.reserve.is_none());
        check("VMM_STACKS", "1", 0, &|of| of.stacks);
        check("VMM_STACKS", "yes", 1, &|of| !of.stacks);
        check("VMM_LOG_FILE", "", 0, &|of| of.file.is_none());
        // Any bytes are a file's name.
        let name = OsStr::from_bytes(b"/log-\xff");
        let options = Options::of(|asked| (asked == "VMM_LOG_FILE").then(|| name.to_owned()));
        assert_eq!(options.file.as_deref(), Some(Path::new(name)));
    }
}
