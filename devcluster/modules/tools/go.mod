module devcluster/tools

go 1.24.0
