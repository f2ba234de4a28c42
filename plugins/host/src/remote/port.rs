//! One end of a socket: frames out, frames in, and the files that come with them.
use super::wire::{Frame, MOST};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recv, recvmsg, send, sendmsg,
};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Most files that come with one frame.
pub const FILES: usize = 16;

/// As above; questions and answers alternate, so nothing of the next frame comes with the one before.
pub struct Port {
    socket: OwnedFd,
    /// What was received; `filled` bytes of it.
    inbox: Vec<u8>,
    filled: usize,
    /// What is being written.
    pub out: Frame,
}

impl Port {
    pub fn new(socket: impl Into<OwnedFd>) -> Self {
        Self { socket: socket.into(), inbox: vec![0; 1 << 16], filled: 0, out: Frame::default() }
    }

    /// Sends [`out`](Self::out). A closed other end is an error, not a signal.
    pub fn send(&mut self, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut rest = self.out.bytes().ok_or(ErrorKind::FileTooLarge)?;
        if !files.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(files));
            let sent = sendmsg(&self.socket, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL)?;
            rest = &rest[sent..];
        }
        while !rest.is_empty() {
            match send(&self.socket, rest, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Waits for a frame. With `files`, takes those that come with it; else the system closes them.
    pub fn receive(&mut self, mut files: Option<&mut Vec<OwnedFd>>) -> io::Result<()> {
        self.filled = 0;
        let mut need = 4;
        while self.filled < need {
            let got = match self.some(files.as_deref_mut()) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(got) => got,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            self.filled += got;
            if need == 4 && self.filled >= 4 {
                let len = u32::from_le_bytes([self.inbox[0], self.inbox[1], self.inbox[2], self.inbox[3]]);
                if len as usize > MOST {
                    return Err(ErrorKind::InvalidData.into());
                }
                need = 4 + len as usize;
                if self.inbox.len() < need {
                    self.inbox.resize(need, 0);
                }
            }
        }
        if self.filled > need { Err(ErrorKind::InvalidData.into()) } else { Ok(()) }
    }

    fn some(&mut self, files: Option<&mut Vec<OwnedFd>>) -> io::Result<usize> {
        let room = &mut self.inbox[self.filled..];
        let Some(files) = files else {
            return Ok(recv(&self.socket, room, RecvFlags::empty())?.0);
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let room = &mut [IoSliceMut::new(room)];
        let got = recvmsg(&self.socket, room, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                files.extend(received);
            }
        }
        Ok(got)
    }

    /// The frame that was received, without its length; and the one to write.
    pub fn parts(&mut self) -> (&[u8], &mut Frame) {
        (self.inbox.get(4..self.filled).unwrap_or_default(), &mut self.out)
    }
}
