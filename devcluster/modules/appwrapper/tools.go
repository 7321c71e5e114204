//go:build tools

// Package tools names the commands that the development cluster builds, so that go.mod pins them.
package tools

import (
	_ "github.com/project-codeflare/appwrapper/cmd"
)
