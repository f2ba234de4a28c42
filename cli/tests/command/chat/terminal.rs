//! A terminal with a program in it: keys go in, and what a person would see comes out.
use rustix::fs::OFlags;
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Rows of the screen: everything a test does is on it at once.
const ROWS: u16 = 80;
/// A program that shows nothing for so long hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// How a line editor says that it takes keys.
const EDITING: &[u8] = b"\x1b[?2004h";

pub struct Terminal {
    master: File,
    slave: File,
    child: Child,
    bytes: Receiver<Vec<u8>>,
    screen: vt100::Parser,
    shown: Vec<u8>,
    prompts: usize,
}

impl Terminal {
    /// Starts `command` as a shell in a window of so many columns would.
    pub fn start(mut command: Command, columns: u16) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let slave = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(OFlags::NOCTTY.bits() as i32)
            .open(std::ffi::OsStr::from_bytes(path.as_bytes()))
            .unwrap();
        let size = Winsize { ws_row: ROWS, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).unwrap();
        let end = || slave.try_clone().unwrap();
        command.stdin(end()).stdout(end()).stderr(end()).env("TERM", "xterm");
        // SAFETY: two system calls, which may be made between fork and exec.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        let master = File::from(master);
        let mut reader = master.try_clone().unwrap();
        let (sender, bytes) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = reader.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        let screen = vt100::Parser::new(ROWS.try_into().unwrap(), columns.try_into().unwrap(), 0);
        Self { master, slave, child, bytes, screen, shown: Vec::new(), prompts: 0 }
    }

    /// Presses keys.
    pub fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Presses them and Enter, and waits for the next prompt.
    pub fn say(&mut self, keys: &str) {
        self.press(keys);
        self.press("\r");
        self.prompt();
    }

    /// Waits until the next line is asked for.
    pub fn prompt(&mut self) {
        self.prompts += 1;
        let prompts = self.prompts;
        self.until("a prompt", |t| {
            let asked = t.shown.windows(EDITING.len()).filter(|w| *w == EDITING).count();
            let (row, _) = t.screen.screen().cursor_position();
            asked >= prompts && t.row(row).starts_with('>')
        });
    }

    /// Waits until the screen has this text.
    pub fn see(&mut self, text: &str) {
        self.until(text, |t| t.text().contains(text));
    }

    /// Waits until something is so.
    pub fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_so(self) {
            let left = end.saturating_duration_since(Instant::now());
            match self.bytes.recv_timeout(left) {
                Ok(bytes) => {
                    self.screen.process(&bytes);
                    self.shown.extend(bytes);
                }
                Err(e) => panic!("no {what}: {e}; the screen has\n{}", self.text()),
            }
        }
    }

    /// What is on the screen.
    pub fn text(&self) -> String {
        self.screen.screen().contents()
    }

    /// Row and column of the cursor.
    pub fn cursor(&self) -> (u16, u16) {
        self.screen.screen().cursor_position()
    }

    fn row(&self, row: u16) -> String {
        let (_, columns) = self.screen.screen().size();
        self.screen.screen().contents_between(row, 0, row, columns.get())
    }

    /// Whether the terminal shows what is typed and makes lines of it, as a shell leaves it.
    pub fn is_as_found(&self) -> bool {
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// Sends the program a signal, as `kill` does.
    pub fn kill(&self, signal: Signal) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, signal).unwrap();
    }

    /// Waits for the end. The terminal is as it was then, whatever the end was, with the cursor at the
    /// beginning of a line.
    pub fn end(mut self) -> ExitStatus {
        let status = self.child.wait().unwrap();
        while let Ok(bytes) = self.bytes.recv_timeout(Duration::from_millis(50)) {
            self.screen.process(&bytes);
        }
        assert!(self.is_as_found(), "{}", self.text());
        let screen = self.screen.screen();
        assert!(!screen.bracketed_paste() && !screen.hide_cursor(), "{}", self.text());
        assert_eq!(screen.cursor_position().1, 0, "{}", self.text());
        status
    }
}

impl Drop for Terminal {
    /// A test that failed leaves nothing that waits for keys.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
