//! The file that memory of this process is mapped from.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What `/proc/self/maps` says of an area that is shared, and read and written.
#[derive(Debug, PartialEq)]
struct Area {
    start: u64,
    end: u64,
    offset: u64,
    /// Of the file's file system, and its number there.
    device: u64,
    inode: u64,
    path: String,
}

/// Reads a line; none of another kind of area.
fn area(line: &str) -> Option<Area> {
    let mut words = line.splitn(6, ' ');
    let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = words.next()?.split_once('-')?;
    let is_ours = matches!(words.next()?, "rw-s" | "rwxs");
    let offset = hexadecimal(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let device = libc::makedev(hexadecimal(major)? as u32, hexadecimal(minor)? as u32);
    let inode = words.next()?.parse().ok()?;
    let path = words.next().unwrap_or_default().trim_start().to_owned();
    is_ours.then_some(Area {
        start: hexadecimal(start)?,
        end: hexadecimal(end)?,
        offset,
        device,
        inode,
        path,
    })
}

/// The file that all of a range is mapped from, and where the range is in it.
pub(crate) fn file_of(start: u64, end: u64) -> Option<(File, u64)> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let area = maps.lines().filter_map(area).find(|area| area.start <= start && end <= area.end)?;
    Some((open(&area)?, area.offset + (start - area.start)))
}

/// By what the system has of the area itself, for those who may; by its name; by a descriptor that the program has of it.
fn open(area: &Area) -> Option<File> {
    let of_area = PathBuf::from(format!("/proc/self/map_files/{:x}-{:x}", area.start, area.end));
    let named = area.path.starts_with('/').then(|| Path::new(&area.path).to_owned());
    let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten().map(|entry| entry.path());
    [of_area].into_iter().chain(named).chain(descriptors).find_map(|path| {
        let is_it = |of: &fs::Metadata| of.is_file() && (of.dev(), of.ino()) == (area.device, area.inode);
        // A name may be another file's by now, and no pipe is opened to find out.
        fs::metadata(&path).ok().filter(is_it)?;
        let file = OpenOptions::new().read(true).write(true).open(&path).ok()?;
        file.metadata().is_ok_and(|of| is_it(&of)).then_some(file)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas() {
        let check = |line: &str, expected: Option<(u64, u64, u64, u64, &str)>| {
            let found = area(line);
            let found = found.as_ref().map(|of| (of.start, of.end, of.offset, of.inode, &*of.path));
            assert_eq!(found, expected, "{line}");
        };
        check(
            "7f01-7f03 rw-s 00001000 00:1a 77                         /dev/shm/a name",
            Some((0x7f01, 0x7f03, 0x1000, 77, "/dev/shm/a name")),
        );
        check("7f01-7f03 rw-s 00000000 00:01 9 ", Some((0x7f01, 0x7f03, 0, 9, "")));
        check("7f01-7f03 rw-p 00000000 00:00 0 ", None);
        check("7f01-7f03 r--s 00000000 00:1a 77 /dev/shm/a", None);
        check("7f01-7f03 rw-s 00000000 00:1a", None);
        check("7f01 rw-s", None);
        check("", None);
    }
}
