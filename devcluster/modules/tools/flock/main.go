// Command flock takes an exclusive lock on an open file descriptor: flock -n FD.
//
// It exits 0 when the lock is held, 1 when somebody else holds it and 2 for anything else. The lock belongs to the open
// file, so it lasts as long as the shell that opened it. Debian's static busybox has no such applet.
package main

import (
	"fmt"
	"os"
	"strconv"
	"syscall"
)

func main() {
	if len(os.Args) != 3 || os.Args[1] != "-n" {
		fmt.Fprintln(os.Stderr, "usage: flock -n FD")
		os.Exit(2)
	}
	fd, err := strconv.Atoi(os.Args[2])
	if err != nil {
		fmt.Fprintf(os.Stderr, "flock: %q is not a file descriptor\n", os.Args[2])
		os.Exit(2)
	}
	switch err := syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB); err {
	case nil:
	case syscall.EWOULDBLOCK:
		os.Exit(1)
	default:
		fmt.Fprintf(os.Stderr, "flock: descriptor %d: %v\n", fd, err)
		os.Exit(2)
	}
}
