//! Guest files on disk: reading one, and checking the files that it names.

use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use super::{ConfigError, GuestConfig, MAX_FILE, MissingFile, RomSetting, Trust};

impl GuestConfig {
    /// Reads a guest from its TOML file.
    ///
    /// # Errors
    /// When the file can't be read or does not describe a guest; every mistake is listed.
    pub fn load(file: &Path) -> Result<Self, ConfigError> {
        let not_text = |reason: String| ConfigError::NotText { file: file.into(), reason };
        let read = |source| ConfigError::Read { file: file.into(), source };
        let mut data = Vec::new();
        open_file(file, false)
            .and_then(|opened| {
                if opened.metadata()?.is_file() {
                    Ok(opened)
                } else {
                    Err(std::io::Error::other("it is not a regular file"))
                }
            })
            .and_then(|opened| opened.take(MAX_FILE as u64 + 1).read_to_end(&mut data))
            .map_err(read)?;
        if data.len() > MAX_FILE {
            return Err(not_text("it is larger than 1 MiB; a guest file takes a few lines".into()));
        }
        let text = String::from_utf8(data).map_err(|error| {
            let line =
                error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|&&b| b == b'\n').count();
            not_text(format!("line {} is not UTF-8; save it as UTF-8", line + 1))
        })?;
        Self::parse(&text, file)
    }

    /// Checks that the files it names are there and can be opened as the guest needs them.
    ///
    /// # Errors
    /// All that can't.
    pub fn check_files(&self) -> Result<(), ConfigError> {
        let kernel = check_file("boot.kernel", &self.boot.kernel, false, false);
        let initrd = self.boot.initrd.iter().map(|initrd| check_file("boot.initrd", initrd, false, false));
        let disks = self
            .disks
            .iter()
            .enumerate()
            .map(|(i, disk)| check_file(&format!("disks[{i}].path"), &disk.path, !disk.read_only, true));
        let places = self.devices.iter().enumerate();
        let roms = places.filter_map(|(i, address)| match self.settings.get(address)?.rom.as_ref()? {
            RomSetting::File(rom) => Some(check_file(&format!("devices[{i}].rom"), rom, false, false)),
            RomSetting::Hidden => None,
        });
        let places = self.accelerators.iter().enumerate();
        let drivers = places.filter_map(|(i, accelerator)| match &accelerator.trust {
            Trust::Driver { library: Some(library), .. } => {
                Some(check_file(&format!("accelerators[{i}].driver"), library, false, false))
            }
            _ => None,
        });
        let checked = std::iter::once(kernel).chain(initrd).chain(roms).chain(drivers).chain(disks);
        let missing: Vec<_> = checked.filter_map(Result::err).collect();
        if missing.is_empty() { Ok(()) } else { Err(ConfigError::MissingFiles(missing)) }
    }
}

/// Opens without waiting for the other end of a FIFO, and without becoming a terminal's owner.
pub(crate) fn open_file(path: &Path, write: bool) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(write).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

fn check_file(key: &str, path: &Path, write: bool, block: bool) -> Result<(), MissingFile> {
    let error = |reason: String| MissingFile { key: key.to_owned(), path: path.into(), reason };
    let opened = open_file(path, write).map_err(|source| {
        let remedy = match source.kind() {
            std::io::ErrorKind::NotFound => {
                "correct the path; relative paths start at the guest file's directory"
            }
            _ if write => "make it writable for this user, or set `read_only = true`",
            _ => "make it readable for this user",
        };
        error(format!("{source}; {remedy}"))
    })?;
    let kind = opened.metadata().map_err(|source| error(source.to_string()))?.file_type();
    match (kind.is_file(), block && kind.is_block_device(), block) {
        (true, ..) | (_, true, _) => Ok(()),
        (_, _, true) => Err(error("it is neither a file nor a block device; name a raw disk image".into())),
        (_, _, false) => Err(error("it is not a regular file; name the file itself".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_refuses_what_is_no_guest_file() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let check = |name: &str, content: Option<&[u8]>, expect: &str| {
            let path = dir.path().join(name);
            if let Some(content) = content {
                std::fs::write(&path, content).expect("written");
            }
            let error = GuestConfig::load(&path).expect_err(name).to_string();
            let expect = expect.replace("FILE", &path.display().to_string());
            assert_eq!(error, expect);
        };
        check(
            "absent.toml",
            None,
            "the guest file FILE can't be read: No such file or directory (os error 2); give the path of a TOML \
             file that describes a guest",
        );
        check(
            "huge.toml",
            Some(&vec![b'#'; MAX_FILE + 1]),
            "the guest file FILE can't be read: it is larger than 1 MiB; a guest file takes a few lines",
        );
        check(
            "latin1.toml",
            Some(b"name = \"a\"\n# caf\xe9\n"),
            "the guest file FILE can't be read: line 2 is not UTF-8; save it as UTF-8",
        );
        std::fs::create_dir(dir.path().join("dir.toml")).expect("a directory");
        check(
            "dir.toml",
            None,
            "the guest file FILE can't be read: it is not a regular file; give the path of a TOML file that \
             describes a guest",
        );
        let fifo = dir.path().join("fifo.toml");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .expect("a FIFO");
        check(
            "fifo.toml",
            None,
            "the guest file FILE can't be read: it is not a regular file; give the path of a TOML file that \
             describes a guest",
        );
    }

    #[test]
    fn missing_files_name_their_key() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let at = |name: &str| dir.path().join(name);
        for name in ["vmlinuz", "initrd", "disk.raw"] {
            std::fs::write(at(name), b"x").expect("written");
        }
        std::fs::create_dir(at("dir")).expect("a directory");
        let check = |kernel: &str, initrd: &str, disk: &str, expect: Result<(), &str>| {
            let text = format!(
                "name = \"a\"\nmemory = \"64M\"\n[boot]\nkernel = \"{kernel}\"\ninitrd = \"{initrd}\"\n\
                 [[disks]]\npath = \"{disk}\"\nread_only = true\n"
            );
            let guest = GuestConfig::parse(&text, &at("guest.toml")).expect("a guest");
            let got = guest.check_files().map_err(|error| error.to_string());
            assert_eq!(got, expect.map_err(|text| text.replace("DIR", &dir.path().display().to_string())));
        };
        check("vmlinuz", "initrd", "disk.raw", Ok(()));
        check(
            "absent",
            "initrd",
            "disk.raw",
            Err("`boot.kernel` names DIR/absent: No such file or directory (os error 2); correct the path; \
                 relative paths start at the guest file's directory"),
        );
        check(
            "vmlinuz",
            "dir",
            "disk.raw",
            Err("`boot.initrd` names DIR/dir: it is not a regular file; name the file itself"),
        );
        let disk =
            "`disks[0].path` names DIR/dir: it is neither a file nor a block device; name a raw disk image";
        check("vmlinuz", "initrd", "dir", Err(disk));
        let both =
            format!("`boot.initrd` names DIR/dir: it is not a regular file; name the file itself\n{disk}");
        check("vmlinuz", "dir", "dir", Err(&both));
    }
}
